"""The rows of a step that share their first blocks are found, whichever requests come, go, move and grow."""

from collections.abc import Iterator

import numpy as np
import pytest

from baton.engine.batch import BatchRow
from baton.engine.device.prefix_tree import PrefixTree
from baton.engine.device.shared_prefix import LEAST_ROWS, RowGroup, SharedPrefix
from baton.engine.request import int_array

BLOCK = 4


def keys_read_less(*, num_rows: int, span: int, num_keys: int) -> float:
    """What a group saves if only keys count, and each row of the span costs one."""
    return (num_rows - 1) * num_keys - span


def finder() -> SharedPrefix:
    return SharedPrefix(keys_read_less, block_size=BLOCK)


def row(name: str, blocks: list[int], *, computed: int | None = None, since: int | None = None) -> BatchRow:
    """A decode whose last block has its newest token, unless `computed` says how many tokens come before."""
    start = (len(blocks) - 1) * BLOCK + 1 if computed is None else computed
    return BatchRow(name, int_array([0]), start, int_array(blocks), None, since=since)


def forks(count: int, shared: list[int], *, first: int = 0) -> list[BatchRow]:
    return [row(f"fork-{index}", [*shared, 1000 + index]) for index in range(first, first + count)]


def others(count: int) -> list[BatchRow]:
    return [row(f"other-{index}", [2000 + 3 * index + each for each in range(3)]) for index in range(count)]


def test_rows_with_the_same_first_blocks_are_a_group_and_other_rows_are_not() -> None:
    rows = [*others(2), *forks(LEAST_ROWS, [7, 8, 9]), *others(4)[2:]]
    assert finder().find(rows) == RowGroup(tuple(range(2, 2 + LEAST_ROWS)), 3 * BLOCK)


def test_fewer_rows_are_no_group() -> None:
    assert finder().find(forks(LEAST_ROWS - 1, [7, 8, 9])) is None


def test_a_prefix_shorter_than_a_block_is_not_shared() -> None:
    rows = [row(f"fork-{index}", [7, 1000 + index], computed=BLOCK - 1) for index in range(LEAST_ROWS)]
    assert finder().find(rows) is None


def test_only_whole_blocks_before_every_rows_token_are_shared() -> None:
    late = [row(f"fork-{index}", [7, 8, 9, 10], computed=3 * BLOCK) for index in range(LEAST_ROWS)]
    early = row("early", [7, 8, 9], computed=2 * BLOCK + 1)
    group = finder().find([*late, early])
    assert group == RowGroup(tuple(range(LEAST_ROWS)), 3 * BLOCK)
    assert finder().find([*late[1:], early]) == RowGroup(tuple(range(LEAST_ROWS)), 2 * BLOCK)


def test_a_request_that_comes_back_with_fewer_tokens_shares_only_what_it_has_computed() -> None:
    rows, found = forks(LEAST_ROWS, [7, 8, 9]), finder()
    assert found.find(rows) == RowGroup(tuple(range(LEAST_ROWS)), 3 * BLOCK)
    back = [row("fork-0", [7, 8, 9, 1000], computed=BLOCK + 1), *rows[1:]]
    assert found.find(back) == finder().find(back) == RowGroup(tuple(range(LEAST_ROWS)), BLOCK)


def test_the_group_that_saves_most_is_taken() -> None:
    """Of all rows with a short prefix, half have a longer one."""
    long = [row(f"long-{index}", [1, 2, 3, 4, 5, 6, 1000 + index]) for index in range(12)]
    short = [row(f"short-{index}", [1, 2, 3, 3000 + index]) for index in range(9)]
    assert finder().find([*long, *short]) == RowGroup(tuple(range(12)), 6 * BLOCK)
    assert finder().find([*long[:LEAST_ROWS], *short]) == RowGroup(tuple(range(LEAST_ROWS + 9)), 3 * BLOCK)


def test_a_group_whose_rows_lie_too_far_apart_is_not_worth_it() -> None:
    few = forks(LEAST_ROWS, [7])
    assert finder().find([*few, *others(30)]) is not None
    assert finder().find([*few[:4], *others(30), *few[4:]]) is None


def test_the_group_is_the_same_object_until_it_changes() -> None:
    prefix, rows = finder(), forks(LEAST_ROWS, [7, 8])
    group = prefix.find(rows)
    assert prefix.find(rows) is group
    rows[3] = row("fork-3", [7, 8, 1003, 1500])
    assert prefix.find(rows) is group
    assert prefix.find([*rows, *others(1)]) is group
    assert prefix.find([*others(1), *rows]) == RowGroup(tuple(range(1, LEAST_ROWS + 1)), 2 * BLOCK)


def test_a_request_that_comes_back_with_other_blocks_has_left_the_group() -> None:
    prefix, rows = finder(), forks(LEAST_ROWS + 1, [7, 8])
    prefix.find(rows)
    rows[0] = row("fork-0", [50, 51, 52])
    assert prefix.find(rows) == RowGroup(tuple(range(1, LEAST_ROWS + 1)), 2 * BLOCK)
    assert prefix.find(rows[:-1]) is None


def test_rows_of_one_request_have_its_blocks() -> None:
    """As the rows of its drafts."""
    rows = forks(LEAST_ROWS, [7, 8])
    group = finder().find([*rows, *(each._replace(token_start=each.token_start + 1) for each in rows[:3])])
    assert group == RowGroup(tuple(range(LEAST_ROWS + 3)), 2 * BLOCK)


def steps_of_coming_and_going_requests(seed: int) -> Iterator[list[BatchRow]]:
    """Requests whose blocks begin with one of few sequences, cut anywhere, and that grow, leave and change places."""
    draw = np.random.default_rng(seed)
    stems = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 14, 15], [1, 2, 23], [31, 32, 33, 34]]
    live: dict[str, BatchRow] = {}
    for step in range(40):
        for name in draw.permutation(sorted(live))[: draw.integers(4)].tolist():
            del live[name]
        for index in range(int(draw.integers(6))):
            stem = stems[draw.integers(len(stems))]
            blocks = [*stem[: draw.integers(len(stem) + 1)], 100 * (step + 1) + 10 * index]
            live[f"{step}-{index}"] = row(f"{step}-{index}", blocks)
        for name in draw.permutation(sorted(live))[:3].tolist():
            blocks = [*live[name].block_ids, 100 * (step + 1) + 60 + int(name in live)]
            live[name] = row(name, blocks)
        rows = list(live.values())
        yield [rows[place] for place in draw.permutation(len(rows))] if step % 5 == 0 else rows


@pytest.mark.parametrize("seed", range(5))
def test_the_group_of_each_step_is_that_of_a_search_from_scratch(seed: int) -> None:
    prefix = finder()
    for rows in steps_of_coming_and_going_requests(seed):
        assert prefix.find(rows) == finder().find(rows)


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_has_every_shared_prefix_and_nothing_of_requests_that_left(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tree, tables = PrefixTree(), {}
    for number in range(60):
        name = str(number)
        tables[name] = draw.integers(3, size=draw.integers(6)).tolist()
        tree.add(name, int_array(tables[name]))
        if number > 20:
            gone = sorted(tables)[draw.integers(len(tables))]
            tree.remove(gone)
            del tables[gone]
        found = {(each.num_blocks, each.requests) for each in tree.shared(2)}
        assert found == longest_prefixes(tables)
    for name in tables:
        tree.remove(name)
    assert list(tree.shared(0)) == []


def longest_prefixes(tables: dict[str, list[int]]) -> set[tuple[int, frozenset[str]]]:
    """All sets of two or more requests that share blocks, with the most blocks that each set shares."""
    longest: dict[frozenset[str], int] = {}
    for table in tables.values():
        for stop in range(1, len(table) + 1):
            sharing = frozenset(name for name, other in tables.items() if other[:stop] == table[:stop])
            if len(sharing) > 1:
                longest[sharing] = max(stop, longest.get(sharing, 0))
    return {(stop, sharing) for sharing, stop in longest.items()}
