"""Splits the keys of few queries over a long context among programs, and merges their results.

Without it each tile of queries and kv head has one program, which reads all keys one after the other, while most of the
GPU is idle. The number of programs is chosen from sizes that the host knows, so a captured step may be split. How many
of them have keys, a tile decides by its own context: a tile with few keys has one, which writes the result at once.
Legend: S splits, T tokens, H query heads, V value channels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.paged.call import AttentionCall
from baton.tritonlib.launch import bound, interpreted

# Keys of a split, at least. On an H200 a program reads this many in 14 us, and merging takes about 6.
LEAST_KEYS = 1024
_MOST_SPLITS = 64
# Costs, in the time that a program takes for a key, which is 13 ns on an H200: to begin a program, to merge splits, and
# to write and read a byte of partial results.
_BEGIN_COST, _MERGE_COST, _BYTE_COST = 420.0, 300.0, 4.4e-5
# Memory for partial results of one call.
_MOST_BYTES = 64 * 2**20
_TILE_ROWS = 128
# Programs for each multiprocessor. Most end at once, because a grid has places for as many requests as a captured step
# may have.
_MOST_PROGRAMS = 8
_BLOCK_HEADS, _BLOCK_SPLITS = 4, 8


class Partials(NamedTuple):
    """Memory for partial results of a call, [S, T, H, V], and their natural log-sum-exps, [S, H, T], in float32; the
    pointers are None where keys are not split.

    A tile that has one split writes its result where it belongs, and WRITTEN as the log-sum-exp of its first split.
    """

    out_ptr: Tensor | None
    lse_ptr: Tensor | None


WRITTEN = tl.constexpr(float("inf"))


class SplitLayer(NamedTuple):
    """The sizes of a layer that decide about splits.

    Attributes:
        num_sms: multiprocessors of the GPU.
    """

    num_heads: int
    num_kv_heads: int
    value_size: int
    num_sms: int


def choose_splits(layer: SplitLayer, *, num_tokens: int, num_reqs: int, batch_tokens: int, num_keys: int) -> int:
    """Returns among how many programs to split each tile's keys, so that all programs are expected to end first. 1: not
    split.

    Args:
        num_tokens, num_reqs: prompts of the batch and their tokens, or upper bounds.
        batch_tokens: all tokens of the batch; each has a partial result in memory.
        num_keys: keys of the longest request.
    """
    group = layer.num_heads // layer.num_kv_heads
    tiles = -(-num_tokens * group // _TILE_ROWS)
    programs = layer.num_kv_heads * tiles
    bytes_per_split = batch_tokens * layer.num_heads * (layer.value_size + 1) * 4
    most = min(
        _MOST_PROGRAMS * layer.num_sms // (layer.num_kv_heads * (tiles + num_reqs)),
        num_keys // LEAST_KEYS,
        _MOST_BYTES // max(1, bytes_per_split),
        _MOST_SPLITS,
    )

    def cost(splits: int) -> float:
        rounds = -(-programs * splits // layer.num_sms)
        merge = _MERGE_COST + splits * bytes_per_split * _BYTE_COST if splits > 1 else 0.0
        return rounds * (num_keys / splits + _BEGIN_COST) + merge

    return min(range(1, max(1, most) + 1), key=cost)


def new_partials(call: AttentionCall) -> Partials:
    """Allocates memory for the call's partial results; none if its keys are not split."""
    if call.splits == 1:
        return Partials(None, None)
    num_tokens, num_heads, device = *call.q_THD.shape[:2], call.q_THD.device
    value_size = call.keys.values.shape[-1]
    out = torch.empty(call.splits, num_tokens, num_heads, value_size, dtype=torch.float32, device=device)
    return Partials(out, torch.empty(call.splits, num_heads, num_tokens, dtype=torch.float32, device=device))


def merge_splits(call: AttentionCall, partials: Partials) -> None:
    """Writes the call's results for the tokens that its query starts count, if its keys are split. Their partial
    log-sum-exps are all written; -inf: that split has no keys, and its output is not read."""
    if partials.out_ptr is None:
        return
    splits, num_tokens, num_heads, value_size = partials.out_ptr.shape
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, _BLOCK_HEADS))](
        partials.out_ptr,
        partials.lse_ptr,
        call.out,
        call.lse_HT,
        call.query_start_loc,
        call.num_reqs,
        splits,
        num_tokens,
        num_heads,
        *call.out.stride()[:2],
        *call.lse[1:],
        VALUE_SIZE=value_size,
        BLOCK_H=_BLOCK_HEADS,
        BLOCK_V=max(16, triton.next_power_of_2(value_size)),
        BLOCK_S=_BLOCK_SPLITS,
        INTERPRETED=interpreted(),
        num_warps=4,
    )


@triton.jit
def find_share(num_keys, num_splits, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """Returns how many keys each split of a tile has: whole tiles of keys, and LEAST or more, so that short requests
    have fewer splits than programs."""
    share = (tl.maximum(num_keys, 0) + num_splits - 1) // num_splits
    return tl.maximum((share + BLOCK_N - 1) // BLOCK_N * BLOCK_N, LEAST)


@triton.jit(
    do_not_specialize=["num_reqs", "splits", "num_tokens", "stride_lse_h", "stride_lse_t"],
    do_not_specialize_on_alignment=["query_start_ptr"],  # in a batch with decodes, which come first
)
def _merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    num_reqs,
    splits,
    num_tokens,
    num_heads,
    stride_out_t,
    stride_out_h,
    stride_lse_h,
    stride_lse_t,
    VALUE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merges the partial results of some heads of one token, in order. The output is 0 if no split has keys."""
    token = tl.program_id(0)
    first_head = tl.program_id(1) * BLOCK_H
    if (token < tl.load(query_start_ptr)) | (token >= tl.load(query_start_ptr + num_reqs)):
        return
    if tl.load(partial_lse_ptr + first_head * num_tokens + token) == WRITTEN:  # as are all heads of this token
        return
    heads_H = first_head + tl.arange(0, BLOCK_H)
    exists_H = heads_H < num_heads
    channels_V = tl.arange(0, BLOCK_V)
    acc_HV = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    most_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total_H = tl.zeros([BLOCK_H], tl.float32)
    for start in tl.range(0, bound(splits, INTERPRETED), BLOCK_S):
        splits_S = start + tl.arange(0, BLOCK_S)
        exists_HS = exists_H[:, None] & (splits_S < splits)[None, :]
        lse_places_HS = (splits_S[None, :] * num_heads + heads_H[:, None]) * num_tokens + token
        lse_HS = tl.load(partial_lse_ptr + lse_places_HS, mask=exists_HS, other=float("-inf"))
        new_most_H = tl.maximum(most_H, tl.max(lse_HS, 1))
        safe_most_H = tl.where(new_most_H == float("-inf"), 0.0, new_most_H)  # -inf minus -inf is NaN
        weights_HS = tl.exp(lse_HS - safe_most_H[:, None])
        places_HS = ((splits_S.to(tl.int64)[None, :] * num_tokens + token) * num_heads + heads_H[:, None]) * VALUE_SIZE
        mask_HSV = (lse_HS > float("-inf"))[:, :, None] & (channels_V < VALUE_SIZE)[None, None, :]
        places_HSV = places_HS[:, :, None] + channels_V[None, None, :]
        out_HSV = tl.load(partial_out_ptr + places_HSV, mask=mask_HSV, other=0.0)
        rescale_H = tl.exp(most_H - safe_most_H)
        total_H = total_H * rescale_H + tl.sum(weights_HS, 1)
        acc_HV = acc_HV * rescale_H[:, None] + tl.sum(weights_HS[:, :, None] * out_HSV, 1)
        most_H = new_most_H
    has_none_H = total_H == 0.0
    total_H = tl.where(has_none_H, 1.0, total_H)
    acc_HV = acc_HV / total_H[:, None]
    out_places_HV = token.to(tl.int64) * stride_out_t + heads_H[:, None] * stride_out_h + channels_V[None, :]
    mask_HV = exists_H[:, None] & (channels_V < VALUE_SIZE)[None, :]
    tl.store(out_ptr + out_places_HV, acc_HV.to(out_ptr.dtype.element_ty), mask=mask_HV)
    if lse_ptr is not None:
        lse_H = tl.where(has_none_H, float("-inf"), most_H + tl.log(total_H))
        tl.store(lse_ptr + heads_H.to(tl.int64) * stride_lse_h + token * stride_lse_t, lse_H, mask=exists_H)
