"""Every marked block of the pages about clients runs unchanged, with a client of another project; those of
docs/benchmarking.md run with `baton bench`."""

import subprocess
from pathlib import Path

import pytest

from tests.clients.page import Block, blocks, command
from tests.integration.up import Up

BLOCKS = blocks()


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{block.title} {number}" for number, block in enumerate(BLOCKS)])
def test_a_block_of_the_page_runs(block: Block, cluster: Up, environment: dict[str, str], tmp_path: Path) -> None:
    code = block.at(grpc=cluster.gateway, http=str(cluster.line["http"]).removeprefix("http://"))
    done = subprocess.run(
        command(block.runs_with, code, tmp_path),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "the client printed nothing"
