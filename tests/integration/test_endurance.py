"""A few hundred requests through one pair of processes leave nothing behind."""

from bench.endurance import run


def test_two_hundred_requests_leave_no_block_no_lease_and_no_file_behind() -> None:
    rows = {row.name: row for row in run(lambda line: None, requests=200)}
    for program in ("prefill_node", "decode_node", "gateway"):
        files = rows[f"{program}, open files"]
        assert files.share is not None
        assert files.share <= 1
