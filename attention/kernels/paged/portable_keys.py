"""The portable kernel's loop over keys, which adds a request's keys, tile by tile, to the online softmax of a tile's
queries.

Legend as in `attention.kernels.paged.portable`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.fp8 import from_fp8
from baton.tritonlib.launch import bound
from baton.tritonlib.math import tanh


class KeyRows(NamedTuple):
    """A tensor of keys or values [B, N, H, channels] with adjacent channels."""

    ptr: Tensor
    stride_b: int
    stride_n: int
    stride_h: int


class PortableRequestKeys(NamedTuple):
    """One kv head's keys of one request; `first_key` is the first key that a query of the tile sees."""

    k: KeyRows
    v: KeyRows
    table_ptr: tl.tensor
    first_key: tl.tensor
    seq_len: tl.tensor


class Queries(NamedTuple):
    """A tile's queries, in two parts of channels; the slopes are None without ALiBi."""

    q_MD: tl.tensor
    q_MP: tl.tensor
    positions_M: tl.tensor
    slopes_M: tl.tensor | None


@triton.jit
def attend_keys(
    acc_MV,
    max_M,
    sum_M,
    queries,
    keys,
    start,
    stop,
    scale,
    soft_cap,
    sizes: tl.constexpr,
    mask: tl.constexpr,
    types: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds keys [start, stop) to the online softmax. Without MASKED, every query sees all of them."""
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    BLOCK_N: tl.constexpr = sizes.block_n
    BLOCK_D: tl.constexpr = sizes.block_d
    BLOCK_P: tl.constexpr = sizes.block_p
    KEY_SIZE: tl.constexpr = sizes.key_size
    WINDOW: tl.constexpr = mask.window
    CHUNK: tl.constexpr = mask.chunk
    INTERPRETED: tl.constexpr = types.interpreted
    SOFT_CAP: tl.constexpr = soft_cap is not None
    ALIBI: tl.constexpr = queries.slopes_M is not None
    k, v, first_key, seq_len, positions_M = keys.k, keys.v, keys.first_key, keys.seq_len, queries.positions_M
    own_N = tl.arange(0, BLOCK_N)
    blocks = _find_blocks(keys, start, BLOCK_SIZE, BLOCK_N)
    for tile in tl.range(bound(start, INTERPRETED), bound(stop, INTERPRETED), BLOCK_N):
        keys_N = tile + own_N
        exists_N = (keys_N >= first_key) & (keys_N < seq_len)
        if BLOCK_SIZE == 0:
            tile64 = tl.full([], tile, tl.int64)
            k_tile_ptr = k.ptr + tile64 * k.stride_n
            v_tile_ptr = v.ptr + tile64 * v.stride_n
            k_rows_N = own_N * k.stride_n
            v_rows_N = own_N * v.stride_n
        elif BLOCK_SIZE % BLOCK_N == 0:
            k_tile_ptr = k.ptr + (blocks * k.stride_b + tile % BLOCK_SIZE * k.stride_n)
            v_tile_ptr = v.ptr + (blocks * v.stride_b + tile % BLOCK_SIZE * v.stride_n)
            k_rows_N = own_N * k.stride_n
            v_rows_N = own_N * v.stride_n
        else:
            k_tile_ptr = k.ptr
            v_tile_ptr = v.ptr
            k_rows_N = blocks * k.stride_b + keys_N % BLOCK_SIZE * k.stride_n
            v_rows_N = blocks * v.stride_b + keys_N % BLOCK_SIZE * v.stride_n
        # Looked up one tile ahead: loading the address in the same iteration would halve the loads in flight.
        blocks = _find_blocks(keys, tile + BLOCK_N, BLOCK_SIZE, BLOCK_N)
        k_ND = load_rows(k_tile_ptr, k_rows_N, exists_N, KEY_SIZE, BLOCK_D, MASKED)
        k_ND = in_type(k_ND, types.k, INTERPRETED)
        scores_MN = tl.dot(queries.q_MD, tl.trans(k_ND), input_precision="ieee")
        if BLOCK_P:
            k_NP = load_rows(k_tile_ptr + BLOCK_D, k_rows_N, exists_N, KEY_SIZE - BLOCK_D, BLOCK_P, MASKED)
            k_NP = in_type(k_NP, types.k, INTERPRETED)
            scores_MN = tl.dot(queries.q_MP, tl.trans(k_NP), scores_MN, input_precision="ieee")
        if SOFT_CAP:
            scores_MN = soft_cap * tanh(scores_MN * (scale / soft_cap)) * 1.4426950408889634
        elif ALIBI:
            scores_MN *= scale * 1.4426950408889634
        if ALIBI:
            scores_MN += queries.slopes_M[:, None] * (keys_N[None, :] - positions_M[:, None]).to(tl.float32)
        if MASKED:
            seen_MN = exists_N[None, :]
            if mask.causal:
                seen_MN = seen_MN & (keys_N[None, :] <= positions_M[:, None])
            elif WINDOW:
                seen_MN = seen_MN & (keys_N[None, :] < positions_M[:, None] + WINDOW)
            if WINDOW:
                seen_MN = seen_MN & (keys_N[None, :] > positions_M[:, None] - WINDOW)
            if CHUNK:
                seen_MN = seen_MN & (keys_N[None, :] >= (positions_M // CHUNK * CHUNK)[:, None])
            scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
        if SOFT_CAP or ALIBI:
            new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
        else:
            new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * (scale * 1.4426950408889634))
        safe_max_M = new_max_M
        if MASKED:
            # For a query that has seen no key yet, -inf minus -inf would be NaN.
            safe_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        if SOFT_CAP or ALIBI:
            weights_MN = tl.exp2(scores_MN - safe_max_M[:, None])
        else:
            weights_MN = tl.exp2(scores_MN * (scale * 1.4426950408889634) - safe_max_M[:, None])
        rescale_M = tl.exp2(max_M - safe_max_M)
        sum_M = sum_M * rescale_M + tl.sum(weights_MN, 1)
        acc_MV = acc_MV * rescale_M[:, None]
        v_NV = load_rows(v_tile_ptr, v_rows_N, exists_N, sizes.value_size, sizes.block_v, MASKED)
        v_NV = in_type(v_NV, types.v, INTERPRETED)
        acc_MV = tl.dot(weights_MN.to(types.v), v_NV, acc_MV, input_precision="ieee")
        max_M = new_max_M
    return acc_MV, max_M, sum_M


@triton.jit
def _find_blocks(keys, tile, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the blocks of a tile's keys: one number where a block holds whole tiles, else one for each key. A key
    that must not be read gets the nearest readable block."""
    if BLOCK_SIZE == 0:
        return 0
    elif BLOCK_SIZE % BLOCK_N == 0:  # noqa: RET505 (branches of the compiler)
        place = tl.minimum(tl.maximum(tile, keys.first_key), keys.seq_len - 1) // BLOCK_SIZE
        return tl.load(keys.table_ptr + tl.maximum(place, 0)).to(tl.int64)
    else:
        keys_N = tl.minimum(tl.maximum(tile + tl.arange(0, BLOCK_N), keys.first_key), keys.seq_len - 1)
        return tl.load(keys.table_ptr + tl.maximum(keys_N, 0) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def load_rows(pointer, places_N, mask_N, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Loads [N, BLOCK] channels of the given rows; masked entries are 0."""
    channels = tl.arange(0, BLOCK)
    places = pointer + places_N[:, None] + channels[None, :]
    if MASKED:
        return tl.load(places, mask=mask_N[:, None] & (channels < SIZE)[None, :], other=0.0)
    if SIZE < BLOCK:
        return tl.load(places, mask=(channels < SIZE)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def in_type(stored, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    if stored.dtype.primitive_bitwidth == 8:
        return from_fp8(stored, INTERPRETED).to(dtype)
    return stored.to(dtype)
