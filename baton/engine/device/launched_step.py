"""A step that is queued on the device, and its tokens on their way to the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import LOGITS_FIELD, BatonError, InternalError
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import LayerDrafts, RowResult
from baton.engine.device.draft_passes import DraftsOnHost
from baton.engine.device.pooled_states import PoolsOnHost
from baton.engine.device.step_slot import StepSlot, StepSlots
from baton.engine.device.unfolded import Unfolded
from baton.engine.pooling import PooledRows
from baton.engine.sampling.choice import NO_TOKEN
from baton.engine.sampling.prompt_scores import ScoresOnHost


class TokensOnHost(Protocol):
    """Sampled tokens that a queued copy brings to the host; call `outputs` when the device is done."""

    def outputs(self) -> list[TokenOutput]: ...


# Some rows of a step, and their tokens.
Part: TypeAlias = tuple[list[int], TokensOnHost]


@dataclass(frozen=True)
class PlainTokens:
    """The tokens of all rows of a padded step, without logprobs.

    Args:
        output_indices: as in `SampleRow`, one per row.
        unsampled: rows whose token is discarded.
    """

    output_indices: NDArray[np.int64]
    unsampled: frozenset[int]

    def outputs(self, tokens: NDArray[np.int32]) -> list[RowResult]:
        """One output per row. Call it after the tokens have arrived."""
        indices = self.output_indices.tolist()
        token_ids = tokens[: len(indices)].tolist()
        outputs: list[RowResult] = list(map(TokenOutput, token_ids, indices))
        if NO_TOKEN in token_ids:
            for row, token_id in enumerate(token_ids):
                if token_id == NO_TOKEN:
                    outputs[row] = _not_finite("logits for the next token")
        for row in self.unsampled:
            outputs[row] = None
        return outputs


@dataclass(frozen=True)
class Drawn:
    """The tokens of a step.

    Args:
        plain: the tokens of all rows; None: every sampled row is in `parts`.
        parts: rows whose tokens replace those of `plain`, or have logprobs.
        failed: rows whose requests fail with this step.
    """

    plain: PlainTokens | None
    parts: Sequence[Part]
    failed: Mapping[int, BatonError]


@dataclass(frozen=True)
class ReadStates:
    """What a step reads from hidden states besides tokens: prompt logprobs and pooled states, if any are wanted."""

    scores: ScoresOnHost | None = None
    pools: PoolsOnHost | None = None


class LaunchedStep:
    """A step that is queued on the device.

    Args:
        drawn: the tokens of the rows.
        slot: the step's own; it returns to `slots` when the step has ended.
        read: the prompt logprobs and pooled states of the step.
        unfolded: how rows with drafts were computed; None: there are none.
        layer_drafts: of the model's own layer; None: it has drafted none.
        shares_keys: as in `StepComputed`.
    """

    def __init__(
        self,
        num_rows: int,
        drawn: Drawn,
        slot: StepSlot,
        slots: StepSlots,
        read: ReadStates,
        unfolded: Unfolded | None = None,
        layer_drafts: DraftsOnHost | None = None,
        *,
        shares_keys: bool = False,
    ) -> None:
        self.shares_keys = shares_keys
        self._num_rows = num_rows
        self._unfolded = unfolded
        self._drawn = drawn
        self._slot = slot
        self._slots = slots
        self._read = read
        self._layer_drafts = layer_drafts
        self._seconds = self._draft_s = 0.0
        self._results: Sequence[RowResult] = ()
        self._pools: PooledRows = {}

    def wait(self) -> list[RowResult]:
        """One entry per row. Call it once, on any thread. Raises device errors."""
        self._seconds = self._slot.timer.wait()
        if self._layer_drafts is not None:
            self._draft_s = self._slot.draft_timer.wait()
        results: list[RowResult] = [None] * self._num_rows
        if self._drawn.plain is not None:
            results = self._drawn.plain.outputs(self._slot.tokens_host)
        self._slots.give_back(self._slot)
        for indices, tokens in self._drawn.parts:
            for index, token in zip(indices, tokens.outputs(), strict=True):
                results[index] = _not_finite("logits for the next token") if token.token_id == NO_TOKEN else token
        self._pools = {} if self._read.pools is None else self._read.pools.outputs()
        for index, values in self._pools.items():
            if not np.isfinite(values).all():
                results[index] = _not_finite("pooled hidden states")
        for index, error in self._drawn.failed.items():
            results[index] = error
        if self._unfolded is not None:
            results = self._unfolded.results(results)
        self._results = results
        return results

    @property
    def layer_drafts(self) -> LayerDrafts | None:
        """The drafts of the model's own layer after each row's last token; known after `wait`. None: it has drafted
        none."""
        if self._layer_drafts is None:
            return None
        found = self._layer_drafts.outputs()
        if self._unfolded is None:
            return LayerDrafts(found, len(found), self._draft_s)
        tokens: dict[int, tuple[int, ...]] = {}
        for row, (result, places) in enumerate(zip(self._results, self._unfolded.places, strict=True)):
            # The drafts after the last draw that is kept.
            place = places[len(result) - 1] if isinstance(result, tuple) else places[-1]
            if place in found:
                tokens[row] = found[place]
        return LayerDrafts(tokens, len(found), self._draft_s)

    @property
    def seconds(self) -> float:
        """Duration of the step on the device; known after `wait`."""
        return self._seconds

    @property
    def scores(self) -> Mapping[int, Sequence[PromptLogprob]]:
        """The logprobs that `Batch.scores` asks for, by row; known after `wait`. Every call makes them anew."""
        found = {} if self._read.scores is None else self._read.scores.outputs()
        return found if self._unfolded is None else self._unfolded.by_row(found)

    @property
    def pools(self) -> PooledRows:
        """The sums that `Batch.pools` asks for, by row; known after `wait`."""
        return self._pools if self._unfolded is None else self._unfolded.by_row(self._pools)


def _not_finite(what: str) -> InternalError:
    message = f"the model's {what} are not finite"
    cure = "check that the weights have no NaN or inf, or give --dtype float32: numbers may overflow in the one in use"
    return InternalError(message, field=LOGITS_FIELD, value="NaN or inf", cure=cure)
