"""Pooling: the mean of some tokens' last hidden states, in place of a sampled token.

One request kind serves every way of pooling, because each of them is a mean over a span: last-token pooling is the span
of the last token, CLS that of the first, mean pooling that of all tokens. A span may begin inside a prompt, so that a
prompt whose beginning another node has computed fits too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import InvalidRequest

Vector: TypeAlias = NDArray[np.float32]
# What one step computes for a row: values as they are, or sums in float64.
Values: TypeAlias = NDArray[np.floating[Any]]
# States that are added up are rounded to multiples of 1 / SUM_SCALE, so by at most 5e-10. Their sums are exact in
# float64 below 2**23: the same in any order, and however a prompt is cut.
SUM_SCALE = 2.0**30


@dataclass(frozen=True)
class PoolSpan:
    """The tokens of a prompt whose last hidden states are averaged: positions `start` to `stop`, exclusive.

    Args:
        logits_of: token ids whose logits after the span's only token are wanted in place of its hidden state.
        classify: the outputs of the model's classification head after the span's only token are wanted instead.
    """

    start: int
    stop: int
    logits_of: tuple[int, ...] = ()
    classify: bool = False

    @property
    def has_head(self) -> bool:
        """Whether a head of the model is applied to the hidden state."""
        return bool(self.logits_of) or self.classify

    def within(self, start: int, stop: int) -> range:
        """The tokens of the span among the positions from `start` to `stop`, counted from `start`."""
        return range(max(self.start, start) - start, max(min(self.stop, stop), start) - start)

    def check(self, num_tokens: int, *, vocab_size: int) -> None:
        """Checks that a prompt of so many tokens has this span; raises InvalidRequest otherwise."""
        if not 0 <= self.start < self.stop <= num_tokens:
            raise InvalidRequest(
                f"the span to pool is {self.start}..{self.stop}, and the prompt has {num_tokens} tokens",
                field="pool",
                value=f"{self.start}..{self.stop}",
                allowed=(f"a range of at least one token within 0..{num_tokens}",),
            )
        if self.has_head and (self.stop - self.start > 1 or (self.logits_of and self.classify)):
            raise InvalidRequest(
                "one head of the model is applied to one token",
                field="pool",
                value=f"{self.start}..{self.stop}",
                allowed=("a span of one token and one kind of output",),
            )
        for token_id in self.logits_of:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"logits_of has token id {token_id}",
                    field="logits_of",
                    value=token_id,
                    allowed=(f"0 to {vocab_size - 1}",),
                )


class PoolRow(NamedTuple):
    """The tokens of a row that are summed, counted from the row's first token; see `PoolSpan`."""

    start: int
    stop: int
    logits_of: tuple[int, ...] = ()
    classify: bool = False


@dataclass
class PoolSum:
    """The sum of a request's pooled states, over the chunks of its prompt."""

    span: PoolSpan
    total: Values | None = None

    def row(self, token_start: int, token_stop: int) -> PoolRow | None:
        """What a row with these positions contributes. Returns None if it has no token of the span."""
        tokens = self.span.within(token_start, token_stop)
        if not tokens:
            return None
        return PoolRow(tokens.start, tokens.stop, self.span.logits_of, self.span.classify)

    def add(self, values: Values) -> None:
        """Adds the values of one chunk. A single token's are not rounded yet."""
        if self._count > 1:
            values = np.rint(values.astype(np.float64) * SUM_SCALE) / SUM_SCALE
        self.total = values if self.total is None else self.total + values

    def restart(self) -> None:
        """Forgets the sum, because the prompt is computed again from before the span."""
        self.total = None

    def mean(self) -> Vector:
        """The result, once all tokens of the span are computed."""
        assert self.total is not None, "the span is computed when the prompt ends"
        return (self.total / self._count).astype(np.float32)

    @property
    def _count(self) -> int:
        return self.span.stop - self.span.start


# The pooled values of a step, by row.
PooledRows: TypeAlias = Mapping[int, Values]
