"""Splits the keys of few queries over a long context among programs, and merges their results.

Without it each tile of queries and kv head has one program, which reads all keys one after the other, while most of the
GPU is idle. A split is chosen from sizes alone that the host knows, so a captured step may have one. Legend: S splits,
T tokens, H query heads, V value channels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.paged.call import AttentionCall
from baton.tritonlib.launch import bound, interpreted

# Keys of a split, at least: fewer would take less time than their result takes to be merged.
LEAST_KEYS = 1024
_MOST_SPLITS = 64
# Memory for partial results of one call.
_MOST_BYTES = 64 * 2**20
_TILE_ROWS = 128
# Nanoseconds for a key: of a split program for each 64 rows, of the unsplit kernel's program, and for the merge.
# `attention.cascade` measured 33 and 23 on an H200 for its kernels. What these take is an ESTIMATE until
# `bench.attention.short_chunks` has measured it.
_SPLIT_KEY_NS, _WHOLE_KEY_NS, _MERGE_NS = 33.0, 23.0, 10_000.0
_SPLIT_ROWS = 64
# A captured step of more tokens is not split: it serves ordinary prompts as well, whose contexts are short.
MOST_CAPTURED_TOKENS = 64
# The estimate must be this many times better, so that an error in it makes nothing slower.
_MARGIN = 1.5
# Programs for each multiprocessor, most of which end at once: a grid has places for as many requests as a captured step
# may have.
_MOST_PROGRAMS = 8
_BLOCK_SPLITS = 8


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
    """Returns among how many programs to split each tile's keys; 1 where that is not surely faster.

    Args:
        num_tokens, num_reqs: prompts of the batch and their tokens, or upper bounds.
        batch_tokens: all tokens of the batch; each has a partial result in memory.
        num_keys: keys of the longest request.
    """
    group = layer.num_heads // layer.num_kv_heads
    tiles = -(-num_tokens * group // _TILE_ROWS)
    programs = layer.num_kv_heads * tiles
    bytes_per_split = batch_tokens * layer.num_heads * (layer.value_size + 1) * 4
    splits = min(
        layer.num_sms // programs,
        _MOST_PROGRAMS * layer.num_sms // (layer.num_kv_heads * (tiles + num_reqs)),
        num_keys // LEAST_KEYS,
        _MOST_BYTES // max(1, bytes_per_split),
        _MOST_SPLITS,
    )
    if splits < 2:
        return 1
    whole_ns = num_keys * _WHOLE_KEY_NS
    key_ns = _SPLIT_KEY_NS * -(-min(num_tokens * group, _TILE_ROWS) // _SPLIT_ROWS)
    split_ns = -(-num_keys // splits) * key_ns + _MERGE_NS
    return splits if whole_ns > _MARGIN * split_ns else 1


def new_partials(call: AttentionCall, splits: int) -> tuple[Tensor, Tensor]:
    """Allocates partial results [S, T, H, V] and their natural log-sum-exps [S, H, T], in float32."""
    num_tokens, num_heads, device = *call.q_THD.shape[:2], call.q_THD.device
    value_size = call.keys.values.shape[-1]
    out = torch.empty(splits, num_tokens, num_heads, value_size, dtype=torch.float32, device=device)
    return out, torch.empty(splits, num_heads, num_tokens, dtype=torch.float32, device=device)


def merge_splits(call: AttentionCall, partial_out_STHV: Tensor, partial_lse_SHT: Tensor) -> None:
    """Writes the call's results for the tokens that its query starts count. Their partial log-sum-exps are all written;
    -inf: that split has no keys, and its output is not read."""
    splits, num_tokens, num_heads, value_size = partial_out_STHV.shape
    _merge_kernel[(num_tokens, num_heads)](
        partial_out_STHV,
        partial_lse_SHT,
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
        BLOCK_V=max(16, triton.next_power_of_2(value_size)),
        BLOCK_S=_BLOCK_SPLITS,
        INTERPRETED=interpreted(),
        num_warps=2,
    )


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
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merges the partial results of one token's head, in order. The output is 0 if no split has keys."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if (token < tl.load(query_start_ptr)) | (token >= tl.load(query_start_ptr + num_reqs)):
        return
    channels_V = tl.arange(0, BLOCK_V)
    acc_V = tl.zeros([BLOCK_V], tl.float32)
    most = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in tl.range(0, bound(splits, INTERPRETED), BLOCK_S):
        splits_S = start + tl.arange(0, BLOCK_S)
        lse_places_S = (splits_S * num_heads + head) * num_tokens + token
        lse_S = tl.load(partial_lse_ptr + lse_places_S, mask=splits_S < splits, other=float("-inf"))
        new_most = tl.maximum(most, tl.max(lse_S, 0))
        safe_most = tl.where(new_most == float("-inf"), 0.0, new_most)  # -inf minus -inf is NaN
        weights_S = tl.exp(lse_S - safe_most)
        places_S = ((splits_S.to(tl.int64) * num_tokens + token) * num_heads + head) * VALUE_SIZE
        mask_SV = (lse_S > float("-inf"))[:, None] & (channels_V < VALUE_SIZE)[None, :]
        out_SV = tl.load(partial_out_ptr + places_S[:, None] + channels_V[None, :], mask=mask_SV, other=0.0)
        rescale = tl.exp(most - safe_most)
        total = total * rescale + tl.sum(weights_S, 0)
        acc_V = acc_V * rescale + tl.sum(weights_S[:, None] * out_SV, 0)
        most = new_most
    has_none = total == 0.0
    total = tl.where(has_none, 1.0, total)
    acc_V = acc_V / total
    out_places_V = token.to(tl.int64) * stride_out_t + head * stride_out_h + channels_V
    tl.store(out_ptr + out_places_V, acc_V.to(out_ptr.dtype.element_ty), mask=channels_V < VALUE_SIZE)
    if lse_ptr is not None:
        lse = tl.where(has_none, float("-inf"), most + tl.log(total))
        tl.store(lse_ptr + head.to(tl.int64) * stride_lse_h + token * stride_lse_t, lse)
