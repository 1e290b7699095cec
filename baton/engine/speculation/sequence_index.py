"""Finds where a sequence has had its last tokens before, so that what followed there can be drafted. Pure.

The places after every 3 tokens and after every 12 tokens are sorted by a hash of these tokens. That takes 16 bytes for
each token, and a lookup is two or three binary searches. Tokens that came lately are in a dict until there are enough
of them to be sorted. The hash only finds candidates: their tokens are compared, so that no match is wrong.

A prompt of 131,000 tokens is sorted in pieces. The longest takes 1.2 ms on a shared core, where all at once takes 6 to
10 ms. A lookup in source code takes 5 us after 8,000 tokens and 13 us after 131,000.
"""

from array import array
from bisect import bisect_right
from operator import mul
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.engine.request import IntArray
from baton.engine.speculation.allowance import Allowance

Places: TypeAlias = "array[int]"

SHORT, LONG = 3, 12
# Tokens before two places that are compared. Longer matches count as long as this.
COMPARED = 32
# So many of the latest places are compared. After 3 tokens of source code there are often more, and few after 12.
_CANDIDATES = 8
_NEW_TOKENS = 512
# Runs are sorted again together with the next tokens up to this size, which takes 0.8 ms.
_RUN_TOKENS = 16384
# Places that all indexes together take for one step: a run, and the newest tokens of many requests.
PLACES_PER_STEP = _RUN_TOKENS + 4096
# A key has 32 bits of a hash above the bits of a place. Places after more tokens than these bits hold are not indexed.
_PLACE_BITS = 21
_PLACE = (1 << _PLACE_BITS) - 1
_ALL = (1 << 64) - 1
_WORD_BITS = 32
_WORD = (1 << _WORD_BITS) - 1
# Odd numbers with bits everywhere: tokens of neighbouring ids get distant hashes.
_FACTORS = tuple((0x9E3779B97F4A7C15 * (2 * n + 1) ** 5 | 1) & _ALL for n in range(SHORT))
_FARTHER = tuple((0xD1B54A32D192ED03 * (2 * n + 3) ** 7 | 1) & _ALL for n in range(LONG // SHORT))
# One factor for each of 12 tokens. A hash is the lowest 64 bits of a sum.
_LONG_FACTORS = tuple(farther * factor & _ALL for farther in _FARTHER for factor in _FACTORS)


class Match(NamedTuple):
    """A place before which a sequence has the same tokens as at its end.

    Args:
        length: number of equal tokens, from 3 to 32; there may be more than 32.
        end: tokens before the place.
    """

    length: int
    end: int


class LastTokens:
    """The last tokens of a sequence, as indexes look them up."""

    __slots__ = ("_last", "count", "short", "value")

    def __init__(self, tokens: IntArray) -> None:
        self._last = last = tokens[-COMPARED:]
        self.count = len(last)
        # The last token is in the highest bits, so the highest bit that differs says how many tokens are equal.
        self.value = int.from_bytes(last.tobytes(), "little") << _WORD_BITS * (COMPARED - self.count)
        self.short = _short(last, self.count) if self.count >= SHORT else -1

    def long(self) -> int:
        """Hash of the last 12 tokens. Returns -1 if there are fewer."""
        return _long(self._last, self.count) if self.count >= LONG else -1


class SequenceIndex:
    """Finds places in one sequence.

    Args:
        tokens: the sequence, which may grow at its end.
        allowance: places that may be sorted or added to the dict for one step.
    """

    def __init__(self, tokens: IntArray, allowance: Allowance) -> None:
        self.tokens = tokens
        self._allowance = allowance
        self._runs: list[_Run] = []
        self._indexed = 0  # places up to this one are in a run or among the new ones
        self._new_from = SHORT
        self._latest: dict[int, int] = {}  # by hash, the last one of the new places
        self._before: list[int] = []  # of each new place, the one before it with the same hash; 0: none

    @property
    def num_new(self) -> int:
        """Number of places that are in no run."""
        return len(self._before)

    @property
    def num_indexed(self) -> int:
        """Number of leading tokens after which places are found."""
        return self._indexed

    def extend(self, stop: int) -> None:
        """Indexes the places up to `stop`, which must be known, as far as the allowance goes. A later call goes on."""
        stop = min(stop, _PLACE)
        start = max(SHORT, self._indexed + 1)
        if stop < start:
            return
        if stop - start + len(self._before) >= _NEW_TOKENS:
            self._indexed = self._sort(stop)
        elif count := self._allowance.take(stop - start + 1):
            self._add(start, start + count - 1)
            self._indexed = start + count - 1

    def longest(self, last: LastTokens) -> Match | None:
        """The place whose tokens before it agree with the longest part of `last`, and the latest such place.

        Of many places after the same 3 tokens, those after the same 12 tokens are tried, and the latest 8 otherwise.
        Returns None if there is no place after the same 3 tokens.
        """
        if last.short < 0:
            return None
        ends = self._new_places(last.short)
        num_new = len(ends)
        for run in reversed(self._runs):
            _find(run.short, last.short, ends)
        if len(ends) >= _CANDIDATES and (key := last.long()) >= 0:
            after_long: list[int] = []
            for run in reversed(self._runs):
                _find(run.long, key, after_long)
            if after_long:
                ends[num_new:] = after_long
        return self._best(ends, last)

    def continuation(self, end: int, count: int) -> IntArray:
        """The tokens after a place, at most so many."""
        return self.tokens[end : end + count]

    def _best(self, ends: list[int], last: LastTokens) -> Match | None:
        tokens, value, count = self.tokens, last.value, last.count
        best, best_end = SHORT - 1, 0
        for end in ends:
            start = end - COMPARED
            if start >= 0:
                before = int.from_bytes(tokens[start:end].tobytes(), "little")
            else:
                before = int.from_bytes(tokens[:end].tobytes(), "little") << _WORD_BITS * -start
            equal = (COMPARED * _WORD_BITS - (before ^ value).bit_length()) // _WORD_BITS
            length = min(equal, end, count)
            if length > best:
                best, best_end = length, end
                if length == COMPARED:
                    break
        return Match(best, best_end) if best_end else None

    def _new_places(self, key: int) -> list[int]:
        """The latest of the new places with this hash, latest first."""
        ends: list[int] = []
        end = self._latest.get(key, 0)
        while end and len(ends) < _CANDIDATES:
            ends.append(end)
            end = self._before[end - self._new_from]
        return ends

    def _add(self, start: int, stop: int) -> None:
        tokens, latest, before = self.tokens, self._latest, self._before
        if not before:
            self._new_from = start
        for end in range(start, stop + 1):
            key = _short(tokens, end)
            before.append(latest.get(key, 0))
            latest[key] = end

    def _sort(self, stop: int) -> int:
        """Sorts all new places up to `stop` into a run, together with the last run unless that is large. Returns the
        last place that is indexed then."""
        start = self._new_from if self._before else max(SHORT, self._indexed + 1)
        least = _NEW_TOKENS
        merges = bool(self._runs) and stop - self._runs[-1].start <= _RUN_TOKENS
        if merges:
            start = self._runs[-1].start
            least = stop - start + 1
        count = self._allowance.take(stop - start + 1, least=least)
        if not count:
            return self._indexed
        if merges:
            self._runs.pop()
        self._latest, self._before = {}, []
        self._runs.append(_Run(self.tokens, start, start + count - 1))
        return start + count - 1


class _Run:
    """Sorted keys of the places from `start` to `stop`."""

    def __init__(self, tokens: IntArray, start: int, stop: int) -> None:
        self.start = start
        # The copy lets the sequence grow: an array cannot while its buffer is in use.
        first = max(0, start - LONG)
        token_N = np.frombuffer(tokens[first:stop], np.int32).astype(np.uint64)
        hash_N = np.zeros(len(token_N) - SHORT + 1, np.uint64)  # the first is that of the place `first + SHORT`
        for n, factor in enumerate(_FACTORS):
            hash_N += token_N[n : len(token_N) - SHORT + 1 + n] * np.uint64(factor)
        self.short = _sorted_keys(hash_N[start - first - SHORT :], start)
        count = len(token_N) - LONG + 1
        long_N = np.zeros(max(0, count), np.uint64)  # the first is that of the place `first + LONG`
        for n, factor in enumerate(_FARTHER if count > 0 else ()):
            long_N += hash_N[n * SHORT : n * SHORT + count] * np.uint64(factor)
        self.long = _sorted_keys(long_N, first + LONG)


def _find(keys: Places, key: int, ends: list[int]) -> None:
    """Adds the latest places with this hash, latest first, while there are fewer than the most candidates."""
    place = bisect_right(keys, key | _PLACE) - 1
    while place >= 0 and len(ends) < _CANDIDATES and (found := keys[place]) >= key:
        ends.append(found & _PLACE)
        place -= 1


def _sorted_keys(hash_N: NDArray[np.uint64], first: int) -> Places:
    """Keys in order, for consecutive places from `first` on."""
    word_N = (hash_N >> np.uint64(_WORD_BITS)).astype(np.uint32)
    # Two sorts of 16 bits, which numpy does by counting, take half as long as one sort of the keys.
    low_N, high_N = word_N.astype(np.uint16), (word_N >> np.uint32(16)).astype(np.uint16)
    order_N = np.argsort(low_N, kind="stable")
    order_N = order_N[np.argsort(high_N[order_N], kind="stable")]
    key_N = word_N[order_N].astype(np.uint64) << np.uint64(_PLACE_BITS)
    key_N += (order_N + first).astype(np.uint64)
    # Reading an element of this is several times as fast as of numpy's.
    return array("Q", key_N.tobytes())


def _short(tokens: IntArray, end: int) -> int:
    """Hash of the 3 tokens before a place, as keys have it."""
    first, second, third = _FACTORS
    value = tokens[end - 3] * first + tokens[end - 2] * second + tokens[end - 1] * third
    return (value >> _WORD_BITS & _WORD) << _PLACE_BITS


def _long(tokens: IntArray, end: int) -> int:
    """Hash of the 12 tokens before a place, as keys have it."""
    value: int = sum(map(mul, tokens[end - LONG : end], _LONG_FACTORS))
    return (value >> _WORD_BITS & _WORD) << _PLACE_BITS
