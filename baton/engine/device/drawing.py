"""Draws the next tokens of a step's rows from their logits, and keeps them on the device for the step after it.

Suffixes: R row of a padded step, S row that is sampled, L row that wants logprobs, V vocabulary, N most rows of a step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.host_to_device import to_device
from baton.core.errors import BatonError, InternalError
from baton.engine.batch import Batch, BatchRow
from baton.engine.device.decode_buffers import DecodeBuffers
from baton.engine.device.grammar_rows import GrammarRows
from baton.engine.device.inputs import pending_tokens
from baton.engine.device.launched_step import Drawn, Part, PlainTokens
from baton.engine.device.step_slot import StepSlot
from baton.engine.sampling.row import SampleRow
from baton.engine.sampling.sampler import sample, with_logprobs


class TokenDrawing:
    """Draws the tokens of steps, on the thread that launches them.

    Args:
        is_fixed: graphs write `tokens_N`, so it cannot grow.

    Attributes:
        tokens_N: int32, the tokens that the last step sampled, row by row.
        drawn_S: int32, the tokens of the last call of `draw`.
    """

    def __init__(self, grammars: GrammarRows, tokens_N: Tensor, *, is_fixed: bool) -> None:
        self._grammars = grammars
        self._device: torch.device = tokens_N.device
        self._is_fixed = is_fixed
        self.tokens_N = tokens_N
        self.drawn_S = tokens_N[:0]

    def draw_none(self) -> Drawn:
        """The result of a step that samples no row. It drops all grammar matchers."""
        self._grammars.masks(())
        self.drawn_S = self.tokens_N[:0]
        return Drawn(None, [], {})

    def draw(
        self,
        places: list[int],
        rows: Sequence[BatchRow],
        logits_SV: Tensor,
        pending_S: Tensor | None,
        places_S: Tensor | None,
    ) -> tuple[list[Part], dict[int, BatonError]]:
        """Draws the tokens of these rows of the step, after its forward pass is queued. Returns the tokens, and errors
        of rows by their place in the step. Overwrites the logits.

        Args:
            places_S: `places` on the device; None: the next step reads none of the tokens.
        """
        masks, errors = self._grammars.masks(rows)
        drawn = sample(logits_SV, _samples(rows), pending_R=pending_S, masks=masks)
        self.drawn_S = drawn.chosen_R
        if places_S is not None:
            self.tokens_N.index_copy_(0, places_S, drawn.chosen_R)
        on_host = drawn.to_host()
        self._grammars.drawn(rows, on_host)
        return [(places, on_host)], {places[index]: error for index, error in errors.items()}

    def draw_padded(self, buffers: DecodeBuffers, logits_RV: Tensor, batch: Batch, slot: StepSlot) -> Drawn:
        """The tokens of a padded step, which has drawn a token for each row; redraws those of edited logits."""
        rows = batch.shared_rows
        sampling, num_rows = buffers.host.sampling, len(rows)
        parts: list[Part] = []
        failed: dict[int, BatonError] = {}
        if edited := sorted(sampling.edited):
            (edited_S,) = to_device((np.array(edited, np.int64),), self._device)
            edited_rows = [rows[index].at(batch.step) for index in edited]
            pending_S = pending_tokens(edited_rows, buffers.token_ids.index_select(0, edited_S))
            logits_SV = logits_RV.index_select(0, edited_S)
            parts, failed = self.draw(edited, edited_rows, logits_SV, pending_S, edited_S)
        else:
            self._grammars.masks(())
        # A copy: the host may advance its own array for the next step before this one has ended.
        output_indices = sampling.arrays.output_index_R[:num_rows].copy()
        if wanted := sorted(sampling.with_logprobs):
            logits_LV, chosen_L = logits_RV[:num_rows], self.tokens_N[:num_rows]
            if len(wanted) < num_rows:
                (wanted_L,) = to_device((np.array(wanted, np.int64),), self._device)
                logits_LV, chosen_L = logits_LV.index_select(0, wanted_L), chosen_L.index_select(0, wanted_L)
            counts = [how.params.logprobs or 0 for how in _samples([rows[index] for index in wanted])]
            with_them = with_logprobs(
                logits_LV, chosen_L, output_indices=output_indices[wanted].tolist(), counts=counts
            )
            parts.append((wanted, with_them.to_host()))
        plain = None
        if len(edited) + len(wanted) < num_rows:
            slot.fetch(self.tokens_N)
            plain = PlainTokens(output_indices, frozenset(sampling.unsampled))
        return Drawn(plain, parts, failed)

    def make_room(self, rows: Sequence[BatchRow]) -> None:
        """Makes room for the step's tokens and all places in `token_source`, also if the previous step has failed."""
        needed = max(len(rows), *(row.token_source + 1 for row in rows if row.token_source is not None), 0)
        if needed <= len(self.tokens_N):
            return
        if self._is_fixed:
            raise InternalError(
                f"a step of {needed} rows",
                field="max_requests",
                value=needed,
                allowed=(f"at most {len(self.tokens_N)}",),
            )
        self.tokens_N = pad(self.tokens_N, (0, 2 * needed - len(self.tokens_N)))


def _samples(rows: Sequence[BatchRow]) -> list[SampleRow]:
    return [row.sample for row in rows if row.sample is not None]
