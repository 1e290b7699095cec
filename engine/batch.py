"""The message from scheduler to runner: one step's rows, as plain integers. Knows neither queues nor tensors.

Most rows of a step are those of the step in front, one token further on: the same objects, which nobody has to make and
nobody has to look into again. Rows are named tuples, which are made several times faster than frozen dataclasses.
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
        since: None: the row is as it says. Else it says how it is in the step of that number, and may stand in steps
            behind that too, always at the same place: by one token further on in each.
    """

    request_id: str
    token_ids: IntArray
    token_start: int
    block_ids: IntArray
    sample: SampleRow | None
    token_source: int | None = None
    since: int | None = None

    @property
    def token_stop(self) -> int:
        return self.token_start + len(self.token_ids)

    def at(self, step: int) -> "BatchRow":
        """The row as it is in that step."""
        if self.since is None or self.since == step:
            return self
        further, sample = step - self.since, self.sample
        if sample is not None:
            sample = sample._replace(output_index=sample.output_index + further)
        return self._replace(token_start=self.token_start + further, sample=sample, since=None)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows of a single token come first: attention splits decodes from prefills by query length.

    Args:
        shared_rows: its rows, some of which other steps may have too; see `BatchRow.since`.
        layers_per_group: marks are wanted behind so many layers each; 0: none.
    """

    step: int
    shared_rows: tuple[BatchRow, ...]
    layers_per_group: int = 0

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        """The rows as they are in this step. Makes some: for who has time."""
        return tuple(row.at(self.step) for row in self.shared_rows)
