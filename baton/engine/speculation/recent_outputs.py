"""Keeps outputs that ended lately, so that later requests of the same tenant can be drafted from them. Pure.

Requests have the same root if they have the same model, adapter and cache salt. A lookup sees outputs of one root only,
because how long a draft holds shows in the time between tokens.
"""

from collections import OrderedDict
from collections.abc import Collection
from itertools import takewhile

from baton.engine.request import IntArray, int_array
from baton.engine.speculation.allowance import Allowance
from baton.engine.speculation.sequence_index import LastTokens, Match, SequenceIndex

# Ends an output in a store. No token has this id.
_END = -1
# A root's outputs are in two halves: when the newer one is full, it replaces the older one.
_HALF_TOKENS = 16384
_MOST_TOKENS = 1 << 20
# The index of a root takes 1 KB besides its tokens, so roots with short outputs are bounded by their number.
_MOST_ROOTS = 4096


class RecentOutputs:
    """Outputs by root, those of the least recently used roots are dropped first.

    Args:
        half_tokens: a root has twice as many tokens at most.
        most_tokens: bound of all roots' tokens.
        most_roots: bound of the number of roots.
        allowance: of places to index for one step.
    """

    def __init__(
        self,
        allowance: Allowance,
        *,
        half_tokens: int = _HALF_TOKENS,
        most_tokens: int = _MOST_TOKENS,
        most_roots: int = _MOST_ROOTS,
    ) -> None:
        self._allowance = allowance
        self._half_tokens = half_tokens
        self._most_tokens = most_tokens
        self._most_roots = most_roots
        self._num_tokens = 0
        self._halves: OrderedDict[bytes, list[OutputIndex]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, each output with one more that ends it."""
        return self._num_tokens

    @property
    def roots(self) -> Collection[bytes]:
        """The roots with outputs, the most recently used one last."""
        return self._halves.keys()

    def add(self, root: bytes, output: IntArray) -> None:
        """Keeps an output, or its last tokens if it is too long."""
        output = output[-(self._half_tokens - 1) :]
        if not output:
            return
        halves = self._halves.setdefault(root, [])
        self._halves.move_to_end(root)
        if not halves or halves[-1].num_tokens + len(output) >= self._half_tokens:
            halves.append(OutputIndex(self._allowance))
            if len(halves) > 2:
                self._num_tokens -= halves.pop(0).num_tokens
        halves[-1].add(output)
        self._num_tokens += len(output) + 1
        while len(self._halves) > 1 and (self._num_tokens > self._most_tokens or len(self._halves) > self._most_roots):
            _, dropped = self._halves.popitem(last=False)
            self._num_tokens -= sum(half.num_tokens for half in dropped)

    def drop(self, roots: Collection[bytes]) -> None:
        """Forgets the outputs with these roots."""
        for root in roots:
            self._num_tokens -= sum(half.num_tokens for half in self._halves.pop(root, ()))

    def longest(self, root: bytes, last: LastTokens) -> "tuple[OutputIndex, Match] | None":
        """The place among the root's outputs after the longest match, see `SequenceIndex.longest`. The index keeps the
        place's tokens even when they are dropped here."""
        halves = self._halves.get(root)
        if halves is None:
            return None
        self._halves.move_to_end(root)
        best: tuple[OutputIndex, Match] | None = None
        for half in reversed(halves):
            match = half.longest(last)
            if match is not None and (best is None or match.length > best[1].length):
                best = half, match
        return best


class OutputIndex:
    """Finds places in some outputs of one root."""

    def __init__(self, allowance: Allowance) -> None:
        self._tokens = int_array()
        self._index = SequenceIndex(self._tokens, allowance)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def add(self, output: IntArray) -> None:
        self._tokens += output
        self._tokens.append(_END)

    def longest(self, last: LastTokens) -> Match | None:
        """See `SequenceIndex.longest`. Outputs are indexed when something is looked up, not while they end."""
        self._index.extend(len(self._tokens) - 1)
        return self._index.longest(last)

    def continuation(self, end: int, count: int) -> IntArray:
        """The tokens after a place, at most so many, and none of the next output."""
        return int_array(list(takewhile(_END.__ne__, self._tokens[end : end + count])))
