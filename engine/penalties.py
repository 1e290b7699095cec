"""Everything that edits logits before a token is chosen: bias, penalties, forbidden tokens. Batched, in place.

Knows rows and logits; neither temperature nor randomness. Order: logit bias, repetition, frequency, presence,
forbidden tokens.

Suffixes: R row, P row with penalties, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import SampleRow


def edit_logits(logits_RV: Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies in place what each row asks for; rows that ask for nothing are not touched."""
    _add_bias(logits_RV, rows)
    penalised = [index for index, row in enumerate(rows) if row.history]
    if penalised:
        _penalise(logits_RV, rows, penalised)
    _forbid(logits_RV, rows)


def _add_bias(logits_RV: Tensor, rows: Sequence[SampleRow]) -> None:
    entries = [(i, token_id, bias) for i, row in enumerate(rows) for token_id, bias in row.params.logit_bias.items()]
    if entries:
        index, token_ids, biases = zip(*entries, strict=True)
        where = _indices(index, token_ids, logits_RV.device)
        logits_RV.index_put_(where, torch.tensor(biases, device=logits_RV.device), accumulate=True)


def _forbid(logits_RV: Tensor, rows: Sequence[SampleRow]) -> None:
    entries = [(i, token_id) for i, row in enumerate(rows) for token_id in row.forbidden]
    if entries:
        index, token_ids = zip(*entries, strict=True)
        where = _indices(index, token_ids, logits_RV.device)
        logits_RV.index_put_(where, torch.tensor(-torch.inf, device=logits_RV.device))


def _penalise(logits_RV: Tensor, rows: Sequence[SampleRow], penalised: list[int]) -> None:
    """Repetition over prompt and output, the others over the output alone.

    Repetition divides positive logits and multiplies negative ones; frequency subtracts per occurrence, presence once.
    """
    device = logits_RV.device
    asking = [rows[index] for index in penalised]
    index_P = torch.tensor(penalised, device=device)
    logits_PV = logits_RV[index_P]
    output_PV = _count([np.frombuffer(row.history, np.int32)[row.prompt_tokens :] for row in asking], logits_PV)
    prompt_PV = _count([np.frombuffer(row.history, np.int32)[: row.prompt_tokens] for row in asking], logits_PV)
    factors = [
        (row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty) for row in asking
    ]
    repetition_P1, frequency_P1, presence_P1 = torch.tensor(factors, device=device).T.unsqueeze(2).unbind(0)
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
    logits_PV = torch.where((output_PV + prompt_PV) > 0, repeated_PV, logits_PV)
    logits_PV -= frequency_P1 * output_PV
    logits_PV -= presence_P1 * (output_PV > 0)
    logits_RV[index_P] = logits_PV


def _count(token_ids: list["np.ndarray[tuple[int], np.dtype[np.int32]]"], like_PV: Tensor) -> Tensor:
    """How often each token occurs in each row's ids, in the shape and dtype of `like_PV`."""
    num_rows, vocab_size = like_PV.shape
    offsets = np.repeat(np.arange(num_rows) * vocab_size, [len(ids) for ids in token_ids])
    flat = torch.from_numpy(np.concatenate(token_ids) + offsets).to(like_PV.device)
    return torch.bincount(flat, minlength=num_rows * vocab_size).view(num_rows, vocab_size).to(like_PV.dtype)


def _indices(rows: tuple[int, ...], token_ids: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    row_index, token_index = torch.tensor([rows, token_ids], device=device).unbind(0)
    return row_index, token_index
