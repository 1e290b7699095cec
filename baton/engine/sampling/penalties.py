"""Everything that edits logits before a token is chosen: bias, penalties, forbidden tokens, grammars. Batched and in
place.

Order: logit bias, repetition, frequency, presence, forbidden tokens, grammars. An edit is prepared on the host from the
rows and queued on the device; the host does not wait for it.

Suffixes: R row, P row with penalties, E place that is edited, H token of a history, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.sampling.masks import Masks, keep_allowed
from baton.engine.sampling.row import SampleRow

# A repetition penalty may be any number above 0, and logits are float32. Logits up to 3e8 stay finite.
_REPETITION_LOW, _LARGEST = 1e-30, float(np.finfo(np.float32).max)


class Edit(NamedTuple):
    """`apply(logits_RV, *arrays)` with the arrays on the logits' device."""

    arrays: tuple[NDArray[Any], ...]
    apply: Callable[..., None]


def edits_of(rows: Sequence[SampleRow], *, pending_R: Tensor | None = None, masks: Masks | None = None) -> list[Edit]:
    """The edits that the rows ask for, in order. Rows that ask for none keep their logits.

    Args:
        pending_R: int32, on the device: each row's newest token where its history lacks it, else -1.
        masks: the masks of the rows with a grammar.
    """
    allowed = None if masks is None else Edit((masks.rows_G, masks.masks_GW), keep_allowed)
    edits = (_bias(rows), _penalties(rows, pending_R), _forbidden(rows), allowed)
    return [edit for edit in edits if edit is not None]


def _bias(rows: Sequence[SampleRow]) -> Edit | None:
    entries = [(i, token_id, bias) for i, row in enumerate(rows) for token_id, bias in row.params.logit_bias.items()]
    if not entries:
        return None
    index, token_ids, biases = zip(*entries, strict=True)
    return Edit((np.array(index), np.array(token_ids), np.array(biases, np.float32)), _add)


def _forbidden(rows: Sequence[SampleRow]) -> Edit | None:
    # The mask of a grammar has its row's forbidden tokens: a complete grammar allows nothing else.
    plain = [(i, row) for i, row in enumerate(rows) if row.params.grammar is None]
    entries = [(i, token_id) for i, row in plain for token_id in row.forbidden]
    if not entries:
        return None
    index, token_ids = zip(*entries, strict=True)
    return Edit((np.array(index), np.array(token_ids)), _forbid)


def _penalties(rows: Sequence[SampleRow], pending_R: Tensor | None) -> Edit | None:
    penalised = [index for index, row in enumerate(rows) if row.history]
    if not penalised:
        return None
    rows_P = [rows[index] for index in penalised]
    lengths_P = np.array([len(row.history) for row in rows_P])
    starts_P = lengths_P.cumsum() - lengths_P
    factors = [
        (
            max(row.params.repetition_penalty, _REPETITION_LOW),
            row.params.frequency_penalty,
            row.params.presence_penalty,
        )
        for row in rows_P
    ]
    arrays = (
        np.array(penalised),
        np.concatenate([np.frombuffer(row.history, np.int32) for row in rows_P]),
        np.stack((lengths_P, starts_P, starts_P + [row.prompt_tokens for row in rows_P])),
        np.array(factors).clip(max=_LARGEST).astype(np.float32).T,
    )
    return Edit(arrays, partial(_penalise, pending_R=pending_R))


def _add(logits_RV: Tensor, index_E: Tensor, token_ids_E: Tensor, bias_E: Tensor) -> None:
    logits_RV[index_E, token_ids_E] += bias_E


def _forbid(logits_RV: Tensor, index_E: Tensor, token_ids_E: Tensor) -> None:
    logits_RV.index_put_((index_E, token_ids_E), logits_RV.new_full((), -torch.inf))


def _penalise(
    logits_RV: Tensor,
    index_P: Tensor,
    history_H: Tensor,
    bounds_3P: Tensor,
    factors_3P: Tensor,
    *,
    pending_R: Tensor | None,
) -> None:
    """Repetition counts prompt and output, frequency and presence count the output alone.

    Repetition divides positive logits and multiplies negative ones; frequency subtracts per occurrence, presence once.

    Args:
        history_H: prompt and output of all rows, concatenated.
        bounds_3P: of each row in `history_H`: its length, its start, and the start of its output.
    """
    num_rows, vocab_size = len(index_P), logits_RV.shape[1]
    lengths_P, starts_P, output_starts_P = bounds_3P.unbind(0)
    # Only tokens that occur are read and written: each as often as it occurs, with the same number every time.
    token_E = history_H.long()
    row_E = torch.repeat_interleave(lengths_P, output_size=len(history_H))
    counts_E = torch.arange(len(history_H), device=logits_RV.device) >= output_starts_P[row_E]
    if pending_R is not None:
        pending_P = pending_R[index_P].long()
        known_P = pending_P >= 0
        # A row without a pending token repeats the first token of its history, with a count of 0.
        token_E = torch.cat((token_E, torch.where(known_P, pending_P, token_E[starts_P])))
        row_E = torch.cat((row_E, torch.arange(num_rows, device=logits_RV.device)))
        counts_E = torch.cat((counts_E, known_P))
    place_E = row_E * vocab_size + token_E
    count_PV = logits_RV.new_zeros(num_rows * vocab_size).scatter_add_(0, place_E, counts_E.to(logits_RV.dtype))
    count_E = count_PV[place_E]
    repetition_E, frequency_E, presence_E = factors_3P[:, row_E].unbind(0)
    where_E = (index_P[row_E], token_E)
    logits_E = logits_RV[where_E]
    logits_E = torch.where(logits_E > 0, logits_E / repetition_E, logits_E * repetition_E)
    logits_E -= frequency_E * count_E
    logits_E -= presence_E * (count_E > 0)
    logits_RV[where_E] = logits_E
