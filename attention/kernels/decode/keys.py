"""The loop over keys that decodes share with prompts that are computed in their order.

Where a row must have the same bits as a decode and within a prompt, both are computed by this one loop, in tiles of the
same size: a product of other rows may be another instruction, which rounds otherwise. Keys that a row does not see add
exact zeros to it. Legend: G rows (query heads of one or several tokens), N keys of a tile, D channels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.plan import DecodeTiling
from baton.tritonlib.launch import bound, interpreted
from baton.tritonlib.math import tanh

LOG2_E = tl.constexpr(1.4426950408889634)


class Queries(NamedTuple):
    """The rows of a program. `slopes_G` is None without ALiBi, `positions_G` where all rows are of the last token."""

    q_GD: tl.tensor
    scale_G: tl.tensor
    slopes_G: tl.tensor | None
    positions_G: tl.tensor | None


class HeadKeys(NamedTuple):
    """One kv head's keys and values of a request, [first_key, seq_len): those that any of the rows sees."""

    k_ptr: tl.tensor
    v_ptr: tl.tensor
    stride_b: tl.tensor
    stride_n: tl.tensor
    table_ptr: tl.tensor
    first_key: tl.tensor
    seq_len: tl.tensor


class Limits(NamedTuple):
    """The window and the chunk of each row, as in `attention.kernels.decode.plan`."""

    window: tl.tensor
    chunk: tl.tensor


class Loop(NamedTuple):
    """Constants of a loop. 8-bit numbers are multiplied in `product_type`, which is float16 for `in_half`."""

    head_size: int
    block_g: int
    block_d: int
    block_size: int
    tile_keys: int
    soft_cap: bool
    in_half: bool
    product_type: tl.dtype
    interpreted: bool


_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def loop_of(q_THD: Tensor, kv_layer: Tensor, tiling: DecodeTiling, *, block_g: int, soft_cap: bool) -> Loop:
    """The constants of a loop over this cache, [2, B, N, H, D], for programs of `block_g` rows."""
    # 8-bit numbers are multiplied in float16, which represents all of them; one instruction converts them.
    in_half = kv_layer.dtype.itemsize == 1 and q_THD.dtype != torch.float32
    product_type = tl.float16 if in_half else _TRITON_TYPES[q_THD.dtype]
    head_size = q_THD.shape[-1]
    return Loop(
        head_size=head_size,
        block_g=block_g,
        block_d=max(16, triton.next_power_of_2(head_size)),
        block_size=kv_layer.shape[2],
        tile_keys=tiling.tile_keys,
        soft_cap=soft_cap,
        in_half=in_half,
        product_type=tl.float32 if interpreted() else product_type,
        interpreted=interpreted(),
    )


@triton.jit
def load_queries(q_ptr, places_G, valid_G, scale, loop: tl.constexpr):
    """Returns the queries at these places, in the type of the product, and the scale of each one's scores."""
    BLOCK_G: tl.constexpr = loop.block_g
    BLOCK_D: tl.constexpr = loop.block_d
    channels_D = tl.arange(0, BLOCK_D)
    q_GD = tl.load(
        q_ptr + places_G[:, None] + channels_D[None, :],
        mask=valid_G[:, None] & (channels_D < loop.head_size)[None, :],
        other=0.0,
    )
    scale_G = tl.full([BLOCK_G], 1.0, tl.float32) * scale
    if loop.in_half and q_GD.dtype == tl.bfloat16:
        # Powers of two scale a query to about 1, so that it stays in float16's range.
        q_GD = q_GD.to(tl.float32)
        size_G = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(q_GD), 1), 2.0**-100))))
        q_GD = q_GD / size_G[:, None]
        scale_G *= size_G
    return q_GD.to(loop.product_type), scale_G


@triton.jit
def attend_keys(queries, keys, limits, start, stop, soft_cap, loop: tl.constexpr):
    """Attends to keys [start, stop). Returns weighted values [G, D], largest scores and sums of weights, [G] each. The
    sum of a row that sees no key is 0."""
    BLOCK_G: tl.constexpr = loop.block_g
    BLOCK_D: tl.constexpr = loop.block_d
    TILE_KEYS: tl.constexpr = loop.tile_keys
    BLOCK_SIZE: tl.constexpr = loop.block_size
    INTERPRETED: tl.constexpr = loop.interpreted
    ROWS_DIFFER: tl.constexpr = queries.positions_G is not None
    channels_D = tl.arange(0, BLOCK_D)
    in_head_D = channels_D < loop.head_size
    first_key, seq_len = keys.first_key, keys.seq_len
    acc_GD = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    max_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    sum_G = tl.zeros([BLOCK_G], tl.float32)
    keys_N = start + tl.arange(0, TILE_KEYS)
    seen_N = (keys_N >= first_key) & (keys_N < stop)
    blocks_N = tl.load(keys.table_ptr + keys_N // BLOCK_SIZE, mask=seen_N, other=0)
    for tile in tl.range(bound(start, INTERPRETED), bound(stop, INTERPRETED), TILE_KEYS):
        keys_N = tile + tl.arange(0, TILE_KEYS)
        seen_N = (keys_N >= first_key) & (keys_N < seq_len)
        rows_N = blocks_N.to(tl.int64) * keys.stride_b + keys_N % BLOCK_SIZE * keys.stride_n
        # Loaded one tile ahead: loading the address in the same iteration would halve the loads in flight.
        next_N = keys_N + TILE_KEYS
        blocks_N = tl.load(keys.table_ptr + next_N // BLOCK_SIZE, mask=next_N < stop, other=0)
        places_ND = rows_N[:, None] + channels_D[None, :]
        mask_ND = seen_N[:, None] & in_head_D[None, :]
        # NOTE: unwritten memory may hold NaN, and 0 * NaN is NaN, so both loads are masked to 0.
        k_ND = tl.load(keys.k_ptr + places_ND, mask=mask_ND, other=0.0).to(loop.product_type)
        scores_GN = tl.dot(queries.q_GD, tl.trans(k_ND), input_precision="ieee") * queries.scale_G[:, None]
        if loop.soft_cap:
            scores_GN = soft_cap * tanh(scores_GN / soft_cap)
        scores_GN *= LOG2_E
        seen_GN = seen_N[None, :]
        if ROWS_DIFFER:
            positions_G = queries.positions_G
            if queries.slopes_G is not None:
                scores_GN += queries.slopes_G[:, None] * (keys_N[None, :] - positions_G[:, None]).to(tl.float32)
            first_G = tl.maximum(positions_G - limits.window + 1, positions_G // limits.chunk * limits.chunk)
            seen_GN = seen_GN & (keys_N[None, :] <= positions_G[:, None]) & (keys_N[None, :] >= first_G[:, None])
        elif queries.slopes_G is not None:
            scores_GN += queries.slopes_G[:, None] * (keys_N - (seq_len - 1))[None, :].to(tl.float32)
        scores_GN = tl.where(seen_GN, scores_GN, float("-inf"))
        new_max_G = tl.maximum(max_G, tl.max(scores_GN, 1))
        safe_max_G = new_max_G
        if ROWS_DIFFER:  # for a row that has seen no key yet, -inf minus -inf would be NaN
            safe_max_G = tl.where(new_max_G == float("-inf"), 0.0, new_max_G)
        weights_GN = tl.exp2(scores_GN - safe_max_G[:, None])
        rescale_G = tl.exp2(max_G - safe_max_G)
        sum_G = sum_G * rescale_G + tl.sum(weights_GN, 1)
        v_ND = tl.load(keys.v_ptr + places_ND, mask=mask_ND, other=0.0)
        if loop.in_half and tl.target_info.cuda_capability_geq(8, 9) and not INTERPRETED:
            v_ND = _in_half(v_ND)
        else:
            v_ND = v_ND.to(loop.product_type)
        acc_GD = acc_GD * rescale_G[:, None]
        acc_GD = tl.dot(weights_GN.to(loop.product_type), v_ND, acc_GD, input_precision="ieee")
        max_G = new_max_G
    return acc_GD, max_G, sum_G


@triton.jit
def _in_half(values):
    """Converts 8-bit numbers to float16, four per pair of instructions."""
    # NOTE: declared impure, so that the compiler does not move it after the conversion to a product's layout. It would
    # load byte by byte there, because a column's numbers are not adjacent. The kernel takes 178 us instead of 271.
    CONVERT: tl.constexpr = "cvt.rn.f16x2.e4m3x2" if values.dtype == tl.float8e4nv else "cvt.rn.f16x2.e5m2x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; " + CONVERT + " $0, low; " + CONVERT + " $1, high; }",
        "=r,=r,r",
        [values],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )
