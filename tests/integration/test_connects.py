"""Connects that fail, and prefill nodes that are killed, leave no state in a node."""

from bench.connects import AT_ONCE, REMEMBERED, Watched, endure
from bench.mortal_peer import STEPS
from tests.integration.cluster import LLAMA, machines

CONNECTS = 120
# What pages of code, of gRPC and of the allocator take that were not used before; a worker of UCX has 2.5 MB.
MEMORY_SLACK_MIB = 16
# The connection that asks for the status, and what closes meanwhile. Each of the 11 kinds of connects comes 7 times
# between two readings, so a kind that leaves a file behind shows.
FILES_SLACK = 3


async def test_failed_connects_and_killed_nodes_leave_no_state() -> None:
    with machines() as start:
        flags: dict[str, object] = {"model": LLAMA, "num_blocks": 64}
        processes = start.nodes(("prefill", flags), ("decode", flags))
        prefill, decode = (Watched(process, {}) for process in processes)
        # It raises if a node ends, or cannot pair afterwards.
        await endure(prefill, decode, connects=CONNECTS, kills=len(STEPS), progress=lambda line: None, readings=3)
    assert len(decode.readings["kills"]) == 3
    for readings in (prefill.readings["connects"], decode.readings["connects"], decode.readings["kills"]):
        first, *_, last = readings
        assert last.files <= first.files + FILES_SLACK
        assert last.rss_bytes - first.rss_bytes < MEMORY_SLACK_MIB << 20
        assert last.peers <= REMEMBERED + AT_ONCE
