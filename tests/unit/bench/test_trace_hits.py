"""The prefix hits of one cache for all nodes on a trace."""

import pytest

from baton.load.traces import TraceRequest
from bench.trace_hits import hit_share, host_table, table


def requests(*prompts: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(number, 512 * len(ids), 1, ids, 512) for number, ids in enumerate(prompts)]


def test_only_leading_blocks_are_hits() -> None:
    assert hit_share(requests((1, 2, 3), (1, 2, 4), (9, 2, 3)), None) == pytest.approx(2 / 9)


def test_what_was_used_last_stays_and_the_end_of_a_prompt_leaves_first() -> None:
    prompts = requests((1, 2), (3,), (1, 2))
    assert hit_share(prompts, 3) == pytest.approx(2 / 5)
    assert hit_share(prompts, 2) == pytest.approx(1 / 5)
    assert hit_share(requests((1,), (2,), (1,), (3,), (1,)), 2) == pytest.approx(2 / 5), "a use keeps a block"


def test_a_table_has_a_row_for_each_beginning_of_the_trace() -> None:
    late = TraceRequest(600.0, 512, 1, (1,), 512)
    lines = list(table([*requests((1, 2), (1, 3)), late]))
    assert lines[2] == "| the first 500 s: 2 | 25.0 % | 25.0 % | 25.0 % | 25.0 % | 25.0 % |"
    assert lines[4] == "| all: 3 | 40.0 % | 40.0 % | 40.0 % | 40.0 % | 40.0 % |"


def test_host_memory_of_the_caches_size_adds_no_hits_and_more_does() -> None:
    cache = 30 * 2**30 // (131072 * 512)
    sequence = tuple(range(int(1.8 * cache)))
    lines = list(host_table(requests(sequence, sequence)))
    assert lines[2] == "| 30 GiB | 27.8 % | 41.7 % | 50.0 % | 50.0 % | 50.0 % |"
