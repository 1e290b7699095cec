"""After a thousand requests through one pair of nodes, no process has grown, and no block or lease is in use."""

import pytest

from bench.endurance import run
from tests.warm import launch_warm


@pytest.mark.slow
def test_a_thousand_requests_leave_no_memory_no_block_no_lease_and_no_file_open() -> None:
    # With a few hundred requests, allocators still grow to their working size.
    rows = {row.name: row for row in run(lambda line: None, requests=1000, launch=launch_warm)}
    for program in ("prefill_node", "decode_node", "gateway"):
        memory, files = rows[f"{program}, memory"], rows[f"{program}, open files"]
        assert memory.reached
        assert files.share is not None
        assert files.share <= 1
