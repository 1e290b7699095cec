"""Samples one token per row outside of CUDA graphs: edits logits, chooses tokens, computes logprobs. Queues its work on
the device and does not wait for it.

Logprobs are the log-softmax of the model's logits before any edit.

Suffixes: R row, L row that wants logprobs, N alternative, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from attention.host_to_device import to_device
from baton.core.types import TokenOutput
from baton.engine.sampling.choice import SamplingArrays, SamplingBuffers, choose_tokens
from baton.engine.sampling.masks import Masks
from baton.engine.sampling.penalties import edits_of
from baton.engine.sampling.row import SampleRow
from baton.engine.sampling.top_tokens import top_tokens


@dataclass(frozen=True)
class Logprobs:
    """The logprobs of the rows that want them, on the device.

    Args:
        rows: places of these rows in the batch.
        counts: how many alternatives each row wants.
        chosen_L: float32, of the chosen token.
        values_LN: float32, of the most probable tokens, best first. N is the largest count, and at least 1.
        token_ids_LN: int32.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    chosen_L: Tensor
    values_LN: Tensor
    token_ids_LN: Tensor


@dataclass(frozen=True)
class Sampled:
    """The tokens that a step samples, on the device.

    Args:
        output_indices: as in `SampleRow`, one per row.
        chosen_R: int32, contiguous; NO_TOKEN where logits are not finite.
    """

    output_indices: Sequence[int]
    chosen_R: Tensor
    logprobs: Logprobs | None = None

    def to_host(self) -> "SampledOnHost":
        """Queues one copy to the host after the work of the current stream."""
        words = self.chosen_R
        if self.logprobs is not None:
            parts = (self.logprobs.chosen_L, self.logprobs.values_LN, self.logprobs.token_ids_LN)
            words = torch.cat((words, *(tensor.flatten().view(torch.int32) for tensor in parts)))
        if words.device.type != "cpu":
            words = torch.empty_like(words, device="cpu", pin_memory=True).copy_(words, non_blocking=True)
        if self.logprobs is None:
            return SampledOnHost(self.output_indices, (), (), words)
        return SampledOnHost(self.output_indices, self.logprobs.rows, self.logprobs.counts, words)


@dataclass(frozen=True)
class SampledOnHost:
    """The tokens that a step samples, in host memory that a queued copy fills.

    Args:
        wanted, counts: the rows that want logprobs, and how many alternatives each wants.
        words: int32; the tensors of `Sampled` and of `Logprobs`, concatenated.
    """

    output_indices: Sequence[int]
    wanted: Sequence[int]
    counts: Sequence[int]
    words: Tensor

    def outputs(self) -> list[TokenOutput]:
        """One output per row. Call it after the copy is done."""
        num_rows = len(self.output_indices)
        outputs = list(map(TokenOutput, self.words[:num_rows].tolist(), self.output_indices))
        if self.wanted:
            self._add_logprobs(outputs, self.words[num_rows:].view(-1, len(self.wanted)))
        return outputs

    def _add_logprobs(self, outputs: list[TokenOutput], words_XL: Tensor) -> None:
        number = len(self.wanted)
        alternatives = len(words_XL) // 2
        values_LN = words_XL[1 : 1 + alternatives].view(torch.float32).reshape(number, alternatives)
        token_ids_LN = words_XL[1 + alternatives :].reshape(number, alternatives)
        logprobs = zip(
            self.wanted,
            self.counts,
            words_XL[0].view(torch.float32).tolist(),
            values_LN.tolist(),
            token_ids_LN.tolist(),
            strict=True,
        )
        for index, count, logprob, values, token_ids in logprobs:
            output = outputs[index]
            output.logprob = logprob
            output.top_logprobs = tuple(zip(token_ids[:count], values[:count], strict=True))


def sample(
    logits_RV: Tensor, rows: Sequence[SampleRow], *, pending_R: Tensor | None = None, masks: Masks | None = None
) -> Sampled:
    """Samples one token per row. A row that is not greedy needs a seed.

    Args:
        logits_RV: float32; overwritten.
        pending_R: int32, on the device: each row's newest token where the host does not know it yet, else -1. Penalties
            count it.
        masks: the masks of the rows with a grammar.
    """
    numbers = SamplingArrays.empty(len(rows))
    numbers.fill(rows)
    wanted = tuple(index for index, row in enumerate(rows) if row.params.logprobs is not None)
    edits = edits_of(rows, pending_R=pending_R, masks=masks)
    arrays = [*numbers, np.array(wanted, np.int64), *(array for edit in edits for array in edit.arrays)]
    tensors = iter(to_device(arrays, logits_RV.device))
    buffers = SamplingBuffers(*islice(tensors, len(numbers)))
    wanted_L = next(tensors)
    logprobs_LV = logits_RV[wanted_L].log_softmax(dim=-1) if wanted else None
    for edit in edits:
        edit.apply(logits_RV, *islice(tensors, len(edit.arrays)))
    chosen_R = torch.empty(len(rows), dtype=torch.int32, device=logits_RV.device)
    choose_tokens(logits_RV, buffers, out_R=chosen_R)
    output_indices = [row.output_index for row in rows]
    if logprobs_LV is None:
        return Sampled(output_indices, chosen_R)
    counts = [rows[index].params.logprobs or 0 for index in wanted]
    return Sampled(output_indices, chosen_R, _logprobs(logprobs_LV, chosen_R[wanted_L], rows=wanted, counts=counts))


def with_logprobs(
    logits_LV: Tensor, chosen_L: Tensor, *, output_indices: Sequence[int], counts: Sequence[int]
) -> Sampled:
    """Adds logprobs to tokens that are already chosen. Does not change the logits.

    Args:
        counts: how many alternatives each row wants.
    """
    logprobs = _logprobs(logits_LV.log_softmax(dim=-1), chosen_L, rows=range(len(counts)), counts=counts)
    return Sampled(output_indices, chosen_L, logprobs)


def _logprobs(logprobs_LV: Tensor, chosen_L: Tensor, *, rows: Sequence[int], counts: Sequence[int]) -> Logprobs:
    most = max(1, *counts)
    values_LN, token_ids_LN = top_tokens(logprobs_LV, min(most, logprobs_LV.shape[1]))
    of_chosen_L = logprobs_LV.gather(1, chosen_L.long().clamp_(min=0).unsqueeze(1)).squeeze(1)
    return Logprobs(rows, counts, of_chosen_L, values_LN, token_ids_LN.int())
