"""Chooses one token per row from its logits and six numbers: the part of sampling that a CUDA graph can capture. On a
GPU graphs and eager steps run the same kernels, so both choose alike; this module calls them and has their CPU twin.

A row of temperature 0 takes the largest logit. Other rows divide by the temperature and keep, in this order: the
`top_k` largest logits, of these the fewest whose probability reaches `top_p`, and tokens with at least `min_p` of the
largest probability. Equal logits rank by token id. The choice is the Gumbel-max of counter-based noise, so it depends
on the row's logits, seed and output position, and not on its batch.

Suffixes: R row, S row that is drawn, F row that is filtered, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.sampling.kernels.choose import choose
from baton.engine.sampling.random import exponential_noise
from baton.engine.sampling.row import SampleRow

# In place of a token, where logits are not finite. Steps look it up as token 0, and its request fails.
NO_TOKEN = -1
_LEAST_TEMPERATURE = 1e-30  # about the smallest number that float32 can divide by
_LARGEST_TOP_K = 2**31 - 1
_GREEDY = (0.0, -math.inf, 0, math.inf, 0, 0)


class SamplingArrays(NamedTuple):
    """The numbers of `SamplingBuffers` on the host, in the same order; may be views of memory that is copied whole.

    Args:
        temperature_R: float32; 0 takes the largest logit and ignores all other numbers.
        min_p_R: float32, the logarithm; -inf keeps all.
        top_k_R: int32; 0 keeps all.
        top_p_R: float32; inf keeps all.
        seed_R: int64, the bits of an unsigned number.
        output_index_R: int64.
    """

    temperature_R: NDArray[Any]
    min_p_R: NDArray[Any]
    top_k_R: NDArray[Any]
    top_p_R: NDArray[Any]
    seed_R: NDArray[Any]
    output_index_R: NDArray[Any]

    @classmethod
    def empty(cls, size: int) -> "SamplingArrays":
        dtypes = np.float32, np.float32, np.int32, np.float32, np.int64, np.int64
        return cls(*(np.empty(size, dtype) for dtype in dtypes))

    def fill(self, rows: Sequence[SampleRow]) -> None:
        """Writes `rows` to the first entries; all entries after them become greedy rows."""
        for array, number in zip(self, _GREEDY, strict=True):
            array[len(rows) :] = number
        columns = zip(*map(_numbers, rows), strict=True)
        for array, column in zip(self, columns, strict=bool(rows)):
            array[: len(rows)] = column

    def put(self, place: int, row: SampleRow) -> None:
        """Writes one row to one entry."""
        for array, number in zip(self, _numbers(row), strict=True):
            array[place] = number


class SamplingBuffers(NamedTuple):
    """`SamplingArrays` as tensors on the device."""

    temperature_R: Tensor
    min_p_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    seed_R: Tensor
    output_index_R: Tensor


def _numbers(row: SampleRow) -> tuple[float, float, int, float, int, int]:
    params = row.params
    if params.greedy:
        return _GREEDY
    return (
        max(params.temperature, _LEAST_TEMPERATURE),
        math.log(params.min_p) if params.min_p > 0 else -math.inf,
        min(params.top_k, _LARGEST_TOP_K),
        # In float32 the first tokens may already sum to 1; a row without top_p must not lose the tokens after them.
        params.top_p if params.top_p < 1 else math.inf,
        params.seed - 2**64 if params.seed >= 2**63 else params.seed,
        row.output_index,
    )


def choose_tokens(logits_RV: Tensor, buffers: SamplingBuffers, *, out_R: Tensor) -> None:
    """Writes each row's token to `out_R`, int32. The logits are float32 and stay as they are.

    On a GPU the host reads nothing. The buffers may be longer than the logits. A row whose largest logit is not finite,
    with NaN above all numbers, gets NO_TOKEN.
    """
    if logits_RV.is_cuda:
        choose(logits_RV, *buffers, out_R=out_R)
    else:
        out_R.copy_(_choose(logits_RV, SamplingBuffers(*(tensor[: len(logits_RV)] for tensor in buffers))))


def _choose(logits_RV: Tensor, buffers: SamplingBuffers) -> Tensor:
    """The twin of the kernels on a CPU, where reading a tensor does not wait."""
    drawn_S = buffers.temperature_R.nonzero().squeeze(1)
    top_R, chosen_R = logits_RV.max(dim=-1)
    if len(drawn_S):
        chosen_R[drawn_S] = _draw(logits_RV[drawn_S], SamplingBuffers(*(tensor[drawn_S] for tensor in buffers)))
    return chosen_R.masked_fill_(~top_R.isfinite(), NO_TOKEN)


def _draw(logits_SV: Tensor, buffers: SamplingBuffers) -> Tensor:
    # The largest logit becomes 0 before the division, so that no temperature can overflow it.
    logits_SV = (logits_SV - logits_SV.amax(dim=-1, keepdim=True)).div_(buffers.temperature_R.unsqueeze(1))
    filtered_F = ((buffers.top_k_R > 0) | (buffers.top_p_R < math.inf)).nonzero().squeeze(1)
    if len(filtered_F):
        logits_SV[filtered_F] = _keep_top(
            logits_SV[filtered_F], buffers.top_k_R[filtered_F], buffers.top_p_R[filtered_F]
        )
    if (buffers.min_p_R > -math.inf).any():
        logits_SV.masked_fill_(logits_SV < buffers.min_p_R.unsqueeze(1), -math.inf)
    noise_SV = exponential_noise(buffers.seed_R, buffers.output_index_R, logits_SV.shape[1])
    return logits_SV.sub_(noise_SV.log_()).argmax(dim=-1)


def _keep_top(logits_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor) -> Tensor:
    """Writes -inf for the tokens that `top_k` and `top_p` drop. Overwrites `logits_FV`."""
    vocab_size = logits_FV.shape[1]
    top_k_F = torch.where(top_k_F > 0, top_k_F, vocab_size)
    # Only values are needed, not their places: numpy sorts a row of 128k in 0.6 ms, torch takes 14 ms.
    sorted_FV = torch.from_numpy(np.sort(logits_FV.neg().numpy(), axis=1)).neg_()
    dropped_FV = torch.arange(vocab_size) >= top_k_F.unsqueeze(1)
    probability_FV = sorted_FV.masked_fill(dropped_FV, -math.inf).softmax(dim=-1)
    before_FV = probability_FV.cumsum(dim=-1) - probability_FV
    dropped_FV |= before_FV >= top_p_F.unsqueeze(1)
    dropped_FV[:, 0] = False
    kept_F1 = (~dropped_FV).sum(dim=-1, keepdim=True)
    last_F1 = sorted_FV.gather(1, kept_F1 - 1)
    equal_FV = logits_FV == last_F1
    above_F1 = (logits_FV > last_F1).sum(dim=-1, keepdim=True)
    rest_FV = (logits_FV < last_F1) | (equal_FV & (equal_FV.cumsum(dim=-1) > kept_F1 - above_F1))
    return logits_FV.masked_fill_(rest_FV, -math.inf)
