"""One step of attention, over one tile of keys, that decodes share with prompts, so that a token has the same bits in
both.

Hopper's instruction multiplies 64 rows by any number of columns. A decode has few query rows, so the rows of its
products are keys and channels (`keys_axis` 0), and query rows are columns. A prompt has query rows enough (`keys_axis`
1), and its weights then stay in registers between the two products. The instruction adds the same 16 products at a time
in both; `tests/gpu/test_batch_invariant.py` compares the bits. It also sums the weights, because the compiler's own
sums depend on the layout. The other steps are exact, or leave the compiler no choice of what to round. Keys that a row
does not see add exact zeros to it.

Legend: G query rows (query heads of one or several tokens), N keys of a tile, D channels. Tensors of two axes are
[N, G] and [D, G] or, for `keys_axis` 1, [G, N] and [G, D]; their names have no suffix here.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.loads import in_half
from baton.tritonlib.launch import interpreted
from baton.tritonlib.math import tanh

LOG2_E = tl.constexpr(1.4426950408889634)
# Query rows of a prompt's tile. Each tile reads its keys from L2, so smaller tiles would wait for L2.
PROMPT_ROWS = 128


class Queries(NamedTuple):
    """The query rows of a program. `slopes_G` is None without ALiBi, `positions_G` where all rows are of the last
    token."""

    q_GD: tl.tensor
    scale_G: tl.tensor
    slopes_G: tl.tensor | None
    positions_G: tl.tensor | None


class HeadKeys(NamedTuple):
    """One kv head's keys and values of a request, [first_key, seq_len): those that any of the rows sees. All rows see
    all keys before `seen_stop`."""

    k_ptr: tl.tensor
    v_ptr: tl.tensor
    stride_b: tl.tensor
    stride_n: tl.tensor
    table_ptr: tl.tensor
    first_key: tl.tensor
    seq_len: tl.tensor
    seen_stop: tl.tensor


class Limits(NamedTuple):
    """The window and the chunk of each row, as in `attention.kernels.decode.plan`."""

    window: tl.tensor
    chunk: tl.tensor


class Sums(NamedTuple):
    """Results of some tiles: weighted values, sums of weights (equal copies of them), and largest scores."""

    acc: tl.tensor
    weights: tl.tensor
    max_G: tl.tensor


class Tile(NamedTuple):
    """Constants of a step. 8-bit numbers are multiplied in `product_type`, which is float16 for `in_half`.

    Attributes:
        sum_copies: how often weights are summed; a product takes no fewer.
        limited: rows have a window or a chunk.
    """

    head_size: int
    block_g: int
    block_d: int
    block_size: int
    tile_keys: int
    keys_axis: int
    sum_copies: int
    soft_cap: bool
    limited: bool
    in_half: bool
    product_type: tl.dtype
    interpreted: bool


_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def tile_of(
    q_THD: Tensor, kv_layer: Tensor, tile_keys: int, *, block_g: int, keys_axis: int, soft_cap: bool, limited: bool
) -> Tile:
    """The constants of a step over this cache, [2, B, N, H, D], for programs of `block_g` rows."""
    # 8-bit numbers are multiplied in float16, which represents all of them; one instruction converts them.
    in_half = kv_layer.dtype.itemsize == 1 and q_THD.dtype != torch.float32
    product_type = tl.float16 if in_half else _TRITON_TYPES[q_THD.dtype]
    if interpreted():
        product_type = tl.float32
    least_rows = 16 if product_type == tl.float32 else 64
    head_size = q_THD.shape[-1]
    return Tile(
        head_size=head_size,
        block_g=block_g,
        block_d=max(least_rows, triton.next_power_of_2(head_size)),
        block_size=kv_layer.shape[2],
        tile_keys=tile_keys,
        keys_axis=keys_axis,
        sum_copies=least_rows if keys_axis == 0 else 16,
        soft_cap=soft_cap,
        limited=limited,
        in_half=in_half,
        product_type=product_type,
        interpreted=interpreted(),
    )


@triton.jit
def along_rows(x_G, tile: tl.constexpr):
    """Returns one number per query row as a matrix of one key or channel."""
    return tl.expand_dims(x_G, tile.keys_axis)


@triton.jit
def along_keys(x_N, tile: tl.constexpr):
    """Returns one number per key or channel as a matrix of one query row."""
    return tl.expand_dims(x_N, 1 - tile.keys_axis)


@triton.jit
def load_queries(q_ptr, places_G, valid_G, scale, tile: tl.constexpr):
    """Returns the queries at these places, in the type of the product, and the scale of each one's scores."""
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_D: tl.constexpr = tile.block_d
    channels_D = tl.arange(0, BLOCK_D)
    q_GD = tl.load(
        q_ptr + places_G[:, None] + channels_D[None, :],
        mask=valid_G[:, None] & (channels_D < tile.head_size)[None, :],
        other=0.0,
    )
    scale_G = tl.full([BLOCK_G], 1.0, tl.float32) * scale
    if tile.in_half and q_GD.dtype == tl.bfloat16:
        # Powers of two scale a query to about 1, so that it stays in float16's range.
        q_GD = q_GD.to(tl.float32)
        size_G = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(q_GD), 1), 2.0**-100))))
        q_GD = q_GD / size_G[:, None]
        scale_G *= size_G
    return q_GD.to(tile.product_type), scale_G


@triton.jit
def no_keys(tile: tl.constexpr):
    """Returns the sums before the first tile."""
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_D: tl.constexpr = tile.block_d
    COPIES: tl.constexpr = tile.sum_copies
    if tile.keys_axis == 0:
        acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
        weights = tl.zeros([COPIES, BLOCK_G], tl.float32)
    else:
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        weights = tl.zeros([BLOCK_G, COPIES], tl.float32)
    return Sums(acc, weights, tl.full([BLOCK_G], float("-inf"), tl.float32))


@triton.jit
def load_block_ids(keys, start, stop, tile: tl.constexpr):
    """Returns the blocks of one tile's keys, below `stop`."""
    keys_N = start + tl.arange(0, tile.tile_keys)
    mask_N = (keys_N >= keys.first_key) & (keys_N < stop)
    return tl.load(keys.table_ptr + keys_N // tile.block_size, mask=mask_N, other=0)


@triton.jit
def attend_tile(sums, queries, keys, blocks_N, start, limits, soft_cap, tile: tl.constexpr):
    """Adds the tile of keys from `start` on, whose blocks are given, to the sums."""
    COPIES: tl.constexpr = tile.sum_copies
    TILE_KEYS: tl.constexpr = tile.tile_keys
    AXIS: tl.constexpr = tile.keys_axis
    channels_D = tl.arange(0, tile.block_d)
    keys_N = start + tl.arange(0, TILE_KEYS)
    in_reach_N = (keys_N >= keys.first_key) & (keys_N < keys.seq_len)
    rows_N = blocks_N.to(tl.int64) * keys.stride_b + keys_N % tile.block_size * keys.stride_n
    places_ND = rows_N[:, None] + channels_D[None, :]
    mask_ND = in_reach_N[:, None] & (channels_D < tile.head_size)[None, :]
    # NOTE: unwritten memory may hold NaN, and 0 * NaN is NaN, so both loads are masked to 0.
    k_ND = tl.load(keys.k_ptr + places_ND, mask=mask_ND, other=0.0).to(tile.product_type)
    if AXIS == 0:
        scores = tl.dot(k_ND, tl.trans(queries.q_GD), input_precision="ieee")
    else:
        scores = tl.dot(queries.q_GD, tl.trans(k_ND), input_precision="ieee")

    # Scores of base 2 are `scores * factor_G`. That product is rounded once, together with its difference from the
    # largest. NOTE: with a product followed by a sum the compiler would choose in each kernel what to round.
    factor_G = queries.scale_G * LOG2_E
    if tile.soft_cap:
        scores = tanh(scores * along_rows(queries.scale_G / soft_cap, tile))
        factor_G = tl.full([tile.block_g], LOG2_E, tl.float32) * soft_cap
    if queries.slopes_G is not None:
        distances = along_keys(keys_N, tile) - (keys.seq_len - 1)
        if queries.positions_G is not None:
            distances = along_keys(keys_N, tile) - along_rows(queries.positions_G, tile)
        slopes = tl.broadcast_to(along_rows(queries.slopes_G, tile), scores.shape)
        distances = tl.broadcast_to(distances, scores.shape).to(tl.float32)
        scores = tl.fma(slopes, distances, scores * along_rows(factor_G, tile))
        factor_G = tl.full([tile.block_g], 1.0, tl.float32)

    if start + TILE_KEYS > keys.seen_stop:
        seen = along_keys(in_reach_N, tile)
        if queries.positions_G is not None:
            seen &= along_keys(keys_N, tile) <= along_rows(queries.positions_G, tile)
            if tile.limited:
                first_G = tl.maximum(
                    queries.positions_G - limits.window + 1, queries.positions_G // limits.chunk * limits.chunk
                )
                seen &= along_keys(keys_N, tile) >= along_rows(first_G, tile)
        scores = tl.where(seen, scores, float("-inf"))
    max_G = tl.maximum(sums.max_G, tl.max(scores, AXIS) * factor_G)
    # For a row that has seen no key yet, -inf minus -inf would be NaN.
    safe_max_G = tl.where(max_G == float("-inf"), 0.0, max_G)
    factors = tl.broadcast_to(along_rows(factor_G, tile), scores.shape)
    weights = tl.exp2(tl.fma(scores, factors, tl.broadcast_to(along_rows(-safe_max_G, tile), scores.shape)))
    weights = weights.to(tile.product_type)
    rescale_G = tl.exp2(sums.max_G - safe_max_G)

    v_ND = tl.load(keys.v_ptr + places_ND, mask=mask_ND, other=0.0)
    if tile.in_half and tl.target_info.cuda_capability_geq(8, 9) and not tile.interpreted:
        v_ND = in_half(v_ND)
    else:
        v_ND = v_ND.to(tile.product_type)
    acc = sums.acc * along_rows(rescale_G, tile)
    sum_weights = sums.weights * along_rows(rescale_G, tile)
    if AXIS == 0:
        ones = tl.full([COPIES, TILE_KEYS], 1.0, tile.product_type)
        sum_weights = tl.dot(ones, weights, sum_weights, input_precision="ieee")
        acc = tl.dot(tl.trans(v_ND), weights, acc, input_precision="ieee")
    else:
        ones = tl.full([TILE_KEYS, COPIES], 1.0, tile.product_type)
        sum_weights = tl.dot(weights, ones, sum_weights, input_precision="ieee")
        acc = tl.dot(weights, v_ND, acc, input_precision="ieee")
    return Sums(acc, sum_weights, max_G)


@triton.jit
def partial_result(sums, v_scale, tile: tl.constexpr):
    """Returns the weighted mean of the values and each row's binary log-sum-exp, -inf for a row that saw no key."""
    sum_G = tl.max(sums.weights, tile.keys_axis)  # of equal copies
    sum_G = tl.where(sum_G == 0.0, 1.0, sum_G)
    return sums.acc * along_rows(v_scale / sum_G, tile), sums.max_G + tl.log2(sum_G)
