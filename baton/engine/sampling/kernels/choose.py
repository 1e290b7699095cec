"""Chooses each row's token in four kernels: the best of every slice of the vocabulary; where the row's filters cut; the
best of every slice with noise; the best of all slices. Each slice is its own program, so one row uses the whole GPU.

The slicing changes no result: a token's rank and noise depend on the row and the token alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.sampling.kernels.cut import ROW_POINTERS, cut_kernel
from baton.engine.sampling.kernels.rank import LAST_ID, NO_RANK, logit_of, rank_of, token_if_finite
from baton.tritonlib.launch import interpreted

_SLICE = 1024
_NUM_WARPS = 4
# Slices that a search reads at once, and its warps: each thread holds 16 tokens.
_AT_ONCE = 8
_SEARCH_WARPS = 16
# Noise adds -2.9 to 22.9 to a score: a token that trails the best one by more cannot win.
_REACH = tl.constexpr(-26.0)

_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def noise_words(seed, position, first_id, TOKENS: tl.constexpr):
    """Random uint32 words of `TOKENS` neighbouring token ids; `first_id` and `TOKENS` are multiples of 4."""
    groups = first_id // 4 + tl.arange(0, TOKENS // 4)
    zeros = groups * 0
    word_0, word_1, word_2, word_3 = tl.philox(seed, groups, zeros + position.to(tl.int32), zeros, zeros)
    return tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))


@triton.jit
def exponential_of(words):
    """Exponential(1) variates in float32; above 1e-10, below 17."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_BELOW_ONE)
    # log(1 - uniform), where the quotient corrects the rounding of the difference.
    rest = 1.0 - uniform
    difference = tl.where(rest == 1.0, -1.0, rest - 1.0)
    return tl.where(rest == 1.0, uniform, tl.log(rest) * tl.div_rn(uniform, difference))


def choose(
    logits_RV: Tensor,
    temperature_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    seed_R: Tensor,
    output_index_R: Tensor,
    *,
    out_R: Tensor,
    slice_size: int = _SLICE,
) -> None:
    """Writes each row's token to `out_R`. The per-row numbers are those of
    `baton.engine.sampling.choice.SamplingBuffers`; they may be longer than the logits.

    A row whose largest logit is not finite gets -1.
    """
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.stride(1) == 1, "a row's logits are adjacent"
    assert vocab_size <= LAST_ID.value, "a rank holds token ids of 20 bits"
    slices = triton.cdiv(vocab_size, slice_size)
    best_RS, drawn_RS, sorted_RS = torch.empty(3, num_rows, slices, dtype=torch.int64, device=logits_RV.device)
    top_R, cut_R = torch.empty(2, num_rows, dtype=torch.int64, device=logits_RV.device)
    stride_R = logits_RV.stride(0)
    grid = (slices, num_rows)
    _best_kernel[grid](logits_RV, best_RS, stride_R, vocab_size, SLICE=slice_size, num_warps=_NUM_WARPS)
    cut_kernel[(num_rows,)](
        logits_RV,
        best_RS,
        sorted_RS,
        top_R,
        cut_R,
        out_R,
        temperature_R,
        top_k_R,
        top_p_R,
        stride_R,
        vocab_size,
        slices,
        SLICE=slice_size,
        SLICES=triton.next_power_of_2(slices),
        AT_ONCE=_AT_ONCE,
        INTERPRETED=interpreted(),
        num_warps=_SEARCH_WARPS,
    )
    _draw_kernel[grid](
        logits_RV,
        best_RS,
        drawn_RS,
        top_R,
        cut_R,
        temperature_R,
        min_p_R,
        seed_R,
        output_index_R,
        stride_R,
        vocab_size,
        SLICE=slice_size,
        num_warps=_NUM_WARPS,
    )
    _settle_kernel[(num_rows,)](
        drawn_RS, top_R, out_R, temperature_R, slices, SLICES=triton.next_power_of_2(slices), num_warps=1
    )


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def _best_kernel(logits_ptr, best_ptr, stride_R, vocab_size, SLICE: tl.constexpr):
    slice_, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = slice_ * SLICE + tl.arange(0, SLICE)
    logits = tl.load(logits_ptr + row * stride_R + ids, mask=ids < vocab_size, other=0.0)
    ranks = tl.where(ids < vocab_size, rank_of(logits, ids), NO_RANK)
    tl.store(best_ptr + row * tl.num_programs(0) + slice_, tl.max(ranks, axis=0))


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def _draw_kernel(
    logits_ptr,
    best_ptr,
    drawn_ptr,
    top_ptr,
    cut_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    output_index_ptr,
    stride_R,
    vocab_size,
    SLICE: tl.constexpr,
):
    slice_, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        place = row * tl.num_programs(0) + slice_
        top = logit_of(tl.load(top_ptr + row))
        cut = tl.load(cut_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        best = tl.load(best_ptr + place)
        # The largest logit becomes 0 before the division, so that no temperature can overflow it.
        best_score = tl.div_rn(logit_of(best) - top, temperature)
        drawn = tl.full((), NO_RANK, tl.int64)
        # NOTE: comparisons with NaN are false, so a row of NaN still draws from some slice and yields a token.
        out_of_reach = best_score < tl.maximum(min_p, _REACH)
        if (best >= cut) & (out_of_reach == 0):
            seed = tl.load(seed_ptr + row)
            position = tl.load(output_index_ptr + row)
            ids = slice_ * SLICE + tl.arange(0, SLICE)
            logits = tl.load(logits_ptr + row * stride_R + ids, mask=ids < vocab_size, other=0.0)
            ranks = rank_of(logits, ids)
            scores = tl.div_rn(logits - top, temperature)
            scores = tl.where((ranks < cut) | (scores < min_p), -float("inf"), scores)
            noise = exponential_of(noise_words(seed, position, slice_ * SLICE, SLICE))
            ranks = tl.where(ids < vocab_size, rank_of(scores - tl.log(noise), ids), NO_RANK)
            drawn = tl.max(ranks, axis=0)
        tl.store(drawn_ptr + place, drawn)


@triton.jit(do_not_specialize=["slices"], do_not_specialize_on_alignment=ROW_POINTERS)
def _settle_kernel(drawn_ptr, top_ptr, out_ptr, temperature_ptr, slices, SLICES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature_ptr + row) > 0:
        offsets = tl.arange(0, SLICES)
        drawn = tl.load(drawn_ptr + row * slices + offsets, mask=offsets < slices, other=NO_RANK)
        tl.store(out_ptr + row, token_if_finite(tl.max(drawn, axis=0), tl.load(top_ptr + row)))
