"""Outputs that ended lately: which are found, and how many tokens are kept."""

import numpy as np

from baton.engine.request import int_array
from baton.engine.speculation.recent_outputs import RecentOutputs
from baton.engine.speculation.sequence_index import LastTokens, Match
from tests.unit.engine.speculation.request import plenty

OUTPUT = int_array(list(range(100, 140)))


def found(outputs: RecentOutputs, root: bytes, tokens: list[int]) -> list[int]:
    """What followed these tokens."""
    result = outputs.longest(root, LastTokens(int_array(tokens)))
    return [] if result is None else list(result[0].continuation(result[1].end, 4))


def test_what_followed_in_an_output_is_found() -> None:
    outputs = RecentOutputs(plenty())
    outputs.add(b"a", OUTPUT)
    assert found(outputs, b"a", [1, 2, 110, 111, 112]) == [113, 114, 115, 116]
    result = outputs.longest(b"a", LastTokens(int_array([1, 2, 110, 111, 112])))
    assert result is not None
    assert result[1] == Match(3, 13)


def test_no_other_roots_outputs_are_found() -> None:
    outputs = RecentOutputs(plenty())
    outputs.add(b"a", OUTPUT)
    outputs.add(b"b", int_array([1, 2, 3, 4]))
    assert found(outputs, b"b", [110, 111, 112]) == []
    assert found(outputs, b"c", [110, 111, 112]) == []


def test_nothing_follows_the_end_of_an_output() -> None:
    outputs = RecentOutputs(plenty())
    outputs.add(b"a", OUTPUT)
    outputs.add(b"a", int_array([7, 8, 9]))
    assert found(outputs, b"a", [137, 138, 139]) == []
    assert found(outputs, b"a", [136, 137, 138]) == [139]
    assert found(outputs, b"a", [139, 7, 8]) == []


def test_dropped_roots_are_forgotten() -> None:
    outputs = RecentOutputs(plenty())
    outputs.add(b"a", OUTPUT)
    outputs.add(b"b", OUTPUT)
    outputs.drop({b"a", b"unknown"})
    assert found(outputs, b"a", [110, 111, 112]) == []
    assert found(outputs, b"b", [110, 111, 112]) == [113, 114, 115, 116]
    assert outputs.num_tokens == len(OUTPUT) + 1


def test_a_root_keeps_its_latest_tokens_within_its_bound() -> None:
    generator = np.random.default_rng(0)
    outputs = RecentOutputs(plenty(), half_tokens=500, most_tokens=10_000)
    for _ in range(60):
        output = int_array(generator.integers(0, 1 << 20, int(generator.integers(1, 200))).tolist())
        outputs.add(b"a", output)
        assert outputs.num_tokens <= 1000
        if len(output) > 4:
            assert found(outputs, b"a", list(output[:3])) == list(output[3:7])
    assert outputs.num_tokens >= 500


def test_of_an_output_that_is_too_long_the_end_is_kept() -> None:
    outputs = RecentOutputs(plenty(), half_tokens=100)
    outputs.add(b"a", int_array(list(range(1000))))
    assert outputs.num_tokens <= 100
    assert found(outputs, b"a", [990, 991, 992]) == [993, 994, 995, 996]


def test_the_least_recently_used_roots_are_dropped_first() -> None:
    outputs = RecentOutputs(plenty(), half_tokens=100, most_tokens=300)
    for number in range(7):
        outputs.add(b"%d" % number, OUTPUT)
        found(outputs, b"0", [1, 2, 3])  # a lookup is a use
    assert outputs.num_tokens <= 300
    assert list(outputs.roots) == [b"1", b"2", b"3", b"4", b"5", b"6", b"0"]
    outputs.add(b"7", OUTPUT)
    assert b"1" not in outputs.roots
    assert b"0" in outputs.roots
    assert outputs.num_tokens == 7 * (len(OUTPUT) + 1)


def test_many_roots_with_short_outputs_are_bounded_by_their_number() -> None:
    outputs = RecentOutputs(plenty(), most_roots=5)
    for number in range(9):
        outputs.add(b"%d" % number, int_array([number]))
    assert list(outputs.roots) == [b"4", b"5", b"6", b"7", b"8"]
    assert outputs.num_tokens == 5 * 2
