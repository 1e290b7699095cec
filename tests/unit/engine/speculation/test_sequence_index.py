"""Where a sequence has had its last tokens before, compared with a search that looks at every place."""

from itertools import count, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.request import IntArray, int_array
from baton.engine.speculation.sequence_index import COMPARED, LONG, SHORT, LastTokens, Match, SequenceIndex
from tests.unit.engine.speculation.request import plenty

CANDIDATES = 8


def matches(tokens: IntArray) -> list[Match]:
    """All places before the end with at least 3 equal tokens before them, the latest first."""
    found = []
    for end in range(len(tokens) - 1, SHORT - 1, -1):
        equal = takewhile(lambda n, end=end: n < end and tokens[end - 1 - n] == tokens[-1 - n], count())  # type: ignore[misc]
        length = min(COMPARED, sum(1 for _ in equal))
        if length >= SHORT:
            found.append(Match(length, end))
    return found


def longest(found: list[Match]) -> Match | None:
    """The first one of the longest."""
    return max(found, key=lambda match: match.length, default=None)


def look(index: SequenceIndex) -> Match | None:
    index.extend(len(index.tokens) - 1)
    return index.longest(LastTokens(index.tokens))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_it_finds_the_latest_of_the_longest_matches(tokens: list[int]) -> None:
    found = matches(int_array(tokens))
    if len(found) <= CANDIDATES:
        assert look(SequenceIndex(int_array(tokens), plenty())) == longest(found)


@pytest.mark.parametrize("most_added", [1, 7, 700])
@pytest.mark.parametrize("vocab_size", [2, 5, 30, 1 << 20])
def test_a_sequence_may_grow_by_any_number_of_tokens(vocab_size: int, most_added: int) -> None:
    """Places are found whether they are sorted or not."""
    generator = np.random.default_rng(vocab_size)
    index = SequenceIndex(int_array(), plenty())
    text = generator.integers(0, vocab_size, 200).tolist()
    while len(index.tokens) < 1400:
        if generator.random() < 0.5:  # repeats a part of itself
            start = int(generator.integers(0, len(index.tokens) + 1))
            added = [*index.tokens[start : start + 80], int(generator.integers(vocab_size))]
        else:
            added = generator.choice(text, int(generator.integers(1, 30))).tolist()
        index.tokens.extend(added[:most_added])
        if most_added == 1 and len(index.tokens) % 7:
            look(index)
            continue
        found, match = matches(index.tokens), look(index)
        assert (match is None) == (not found)
        if match is None:
            continue
        assert match in found
        assert match.length >= max(each.length for each in found[:CANDIDATES])
        long = [each for each in found if each.length >= LONG]
        if len(found) <= CANDIDATES or (0 < len(long) <= CANDIDATES and not index.num_new):
            assert match == longest(found)


def test_after_many_places_of_three_tokens_a_longer_match_is_found() -> None:
    often, once = [1, 2, 3], list(range(100, 120))
    tokens = int_array([*once, *often, 7, *(token for n in range(200) for token in (*often, 200 + n)), *once, *often])
    index = SequenceIndex(tokens, plenty())
    index.extend(600)
    assert look(index) == Match(len(once) + len(often), len(once) + len(often))


@pytest.mark.parametrize("period", [1, 2, 3, 17])
def test_a_loop_is_found_one_period_before_its_end(period: int) -> None:
    index = SequenceIndex(int_array(list(range(period)) * 1000), plenty())
    assert look(index) == Match(COMPARED, len(index.tokens) - period)


def test_a_sequence_that_was_never_there_has_no_match() -> None:
    assert look(SequenceIndex(int_array(list(range(5000))), plenty())) is None
    assert look(SequenceIndex(int_array([5, 5]), plenty())) is None
    assert look(SequenceIndex(int_array(), plenty())) is None


def test_it_keeps_16_bytes_for_each_token() -> None:
    generator = np.random.default_rng(0)
    index = SequenceIndex(int_array(generator.integers(0, 1000, 5000).tolist()), plenty())
    index.extend(5000)
    for token in generator.integers(0, 1000, 5000).tolist():
        index.tokens.append(token)
        look(index)
    kept = sum(keys.itemsize * len(keys) for run in index._runs for keys in (run.short, run.long))
    assert kept <= 16 * len(index.tokens)
    assert index.num_new <= 512
    assert len(index._runs) <= 2
