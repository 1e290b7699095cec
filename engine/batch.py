"""The message from scheduler to runner: one step's rows, as plain integers. Knows neither queues nor tensors.

Rows are made anew in every step for every request, so they are named tuples: those are made several times faster than
frozen dataclasses.
"""

from dataclasses import dataclass
from typing import NamedTuple

from baton.types import SamplingParams
from engine.request import IntArray


class SampleRow(NamedTuple):
    """How to draw one row's next token.

    Args:
        output_index: the token's position in the output; with the seed it fixes the draw.
        forbidden: token ids that must not be drawn now.
        history: prompt and output as far as the host knows them when the request has penalties, else empty. The
            token of a row with a `token_source` is not among them, and counts all the same.
        prompt_tokens: how many of `history` are prompt.
    """

    params: SamplingParams
    output_index: int
    forbidden: tuple[int, ...]
    history: IntArray
    prompt_tokens: int


class BatchRow(NamedTuple):
    """One request's part of a step.

    Args:
        token_ids: tokens to compute, the first of them at position `token_start`.
        block_ids: blocks of positions 0 up to the last token to compute.
        token_source: the row of the step in front whose sampled token is this row's only token, which the host does not
            know yet; `token_ids` then holds a 0 in its place. None: `token_ids` are known.
        sample: None when tokens of the known sequence are still to come.
    """

    request_id: str
    token_ids: IntArray
    token_start: int
    block_ids: IntArray
    sample: SampleRow | None
    token_source: int | None = None

    @property
    def token_stop(self) -> int:
        return self.token_start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows of a single token come first: attention splits decodes from prefills by query length."""

    step: int
    rows: tuple[BatchRow, ...]
