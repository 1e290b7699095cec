"""Attention of prompts with the bits of decodes, on Hopper: one program per tile, with one loading warp and two
multiplying warpgroups of 64 rows (`hopper_attend`).

It computes the same as `attention.kernels.in_order.prompts`, for 16-bit caches. Legend as there, with R for requests.

On an H200, bfloat16, 32/8 heads of 128, a prompt of 8,192: 1,107 us; the portable kernel 1,974.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.decode.plan import NO_LIMIT, DecodePlan
from attention.kernels.in_order.hopper_attend import OrderedTile, UnitKeys, attend, new_ones
from attention.kernels.paged.hopper_load import HopperRequestKeys, load_tile
from attention.kernels.paged.hopper_tile import Sizes, new_buffers
from attention.kernels.tma_rows import TmaPlaces, as_rows

_TILE_ROWS = 128
_HEAD_SIZES = (64, 128)
# Tiles of keys in flight. 4 and 5 take 1,137 and 1,145 us.
_STAGES = 3


def launch(
    q_THD: Tensor,
    kv_layer: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scale: float,
    sinks_H: Tensor | None,
    out: Tensor,
) -> bool:
    """Launches the kernel. Returns False and launches nothing if it does not support the sizes, or the cache's address
    and strides."""
    num_tokens, num_heads, head_size = q_THD.shape
    block_size, num_kv_heads = kv_layer.shape[2:4]
    group, tile_keys = num_heads // num_kv_heads, plan.tiling.tile_keys
    if (
        head_size not in _HEAD_SIZES
        or q_THD.dtype not in (torch.bfloat16, torch.float16)
        or kv_layer.dtype != q_THD.dtype
        or group > _TILE_ROWS
        or not (block_size % tile_keys == 0 or block_size in (8, 16, 32))
    ):
        return False
    keys, values = as_rows(kv_layer[0]), as_rows(kv_layer[1])
    if keys is None or values is None:
        return False
    piece = min(block_size, tile_keys)
    num_reqs = query_start_loc.shape[0] - 1
    # A request's tiles: those that its tokens fill, and two that they begin and end in.
    num_tiles = num_tokens // plan.units.tile_tokens + 2 * num_reqs
    _attend_tile[(num_kv_heads, num_tiles)](
        _descriptor(keys.rows, piece, head_size),
        _descriptor(values.rows, piece, head_size),
        q_THD,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        sinks_H,
        scale,
        num_reqs,
        plan.sliding_window or NO_LIMIT,
        plan.attention_chunk_size or NO_LIMIT,
        *q_THD.stride()[:2],
        *out.stride()[:2],
        block_table.stride(0),
        block_size,
        *keys.places,
        *values.places,
        SIZES=Sizes(
            key_size=head_size,
            value_size=head_size,
            group=group,
            pack=group,
            block_a=head_size,
            block_p=0,
            block_v=head_size,
            block_n=tile_keys,
            piece=piece,
            stages=_STAGES,
        ),
        UNITS=plan.units,
        LIMITED=bool(plan.sliding_window or plan.attention_chunk_size),
        BLOCK_R=min(256, max(128, triton.next_power_of_2(num_reqs))),
        num_warps=4,
    )
    return True


def _descriptor(rows: Tensor, piece: int, channels: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([piece, channels], dtype)
    return TensorDescriptor.from_tensor(rows, [piece, channels], layout)


@gluon.jit(
    do_not_specialize=[
        "num_reqs", "window", "chunk", "table_stride", "block_size", "k_row_b", "k_row_h", "k_col_h", "v_row_b",
        "v_row_h", "v_col_h",
    ],
    # In a batch with decodes, which come first, these pointers may have any alignment.
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)  # fmt: skip
def _attend_tile(
    keys,
    values,
    q_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    sinks_ptr,
    scale,
    num_reqs,
    window,
    chunk,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    table_stride,
    block_size,
    k_row_b,
    k_row_h,
    k_col_h,
    v_row_b,
    v_row_h,
    v_col_h,
    SIZES: gl.constexpr,
    UNITS: gl.constexpr,
    LIMITED: gl.constexpr,
    BLOCK_R: gl.constexpr,
):
    """Runs one program: finds its tile and divides the work among its warps."""
    TOKENS: gl.constexpr = UNITS.tile_tokens
    request, query_start, query_len, number = _find_tile(
        query_start_ptr, num_reqs, gl.num_programs(1) - 1 - gl.program_id(1), TOKENS, BLOCK_R
    )
    seq_len = gl.load(seq_lens_ptr + request)
    context = seq_len - query_len
    start = (context // TOKENS + number) * TOKENS
    # NOTE: without keys the warps would wait for ever for a tile that is never loaded. The padding of a captured step
    # has queries and no keys, so `start` is below 0 there.
    if (query_len <= 0) | (seq_len <= 0) | (start >= seq_len):
        return
    first_key = _first_visible_key(gl.maximum(start, context) + 1, window, chunk)
    key_stop = gl.minimum(start + TOKENS, seq_len)
    kv_head = gl.program_id(0)
    table_ptr = block_table_ptr + request.to(gl.int64) * table_stride
    tile = OrderedTile(start, context, seq_len, query_start, kv_head * SIZES.group, first_key, key_stop)
    unit_keys = _unit_keys_of(key_stop, window, chunk, UNITS)
    units = UnitKeys(unit_keys, window, chunk)
    buffers = new_buffers(keys.dtype, SIZES, 1)
    ones_SN = new_ones(keys.dtype, SIZES.block_n)
    places = HopperRequestKeys(0, table_ptr, first_key // block_size, (key_stop - 1) // block_size, block_size)
    k_places, v_places = TmaPlaces(k_row_b, k_row_h, k_col_h), TmaPlaces(v_row_b, v_row_h, v_col_h)
    rows = (q_ptr, q_stride_t, q_stride_h, out_ptr, out_stride_t, out_stride_h, sinks_ptr)
    gl.warp_specialize(
        [
            (attend, (0, rows, scale, buffers, ones_SN, tile, units, SIZES, LIMITED)),
            (attend, (1, rows, scale, buffers, ones_SN, tile, units, SIZES, LIMITED)),
            (_load_keys, (keys, values, buffers, tile, kv_head, places, k_places, v_places, SIZES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load_keys(keys, values, buffers, tile, kv_head, places, k_places, v_places, SIZES: gl.constexpr):
    """Loads all tiles of keys and values into the rings, the first keys first."""
    BLOCK_N: gl.constexpr = SIZES.block_n
    STAGES: gl.constexpr = SIZES.stages
    PIECE: gl.constexpr = SIZES.piece
    CHANNELS: gl.constexpr = SIZES.block_a
    first = tile.first_key // BLOCK_N
    for count in range(0, gl.cdiv(tile.key_stop, BLOCK_N) - first):
        key = (first + count) * BLOCK_N
        stage, phase = count % STAGES, ((count // STAGES) & 1) ^ 1
        mbarrier.wait(buffers.empty_k.index(stage), phase)
        tile_K, full = buffers.k_A.index(stage), buffers.full_k.index(stage)
        load_tile(keys, keys, tile_K, tile_K, full, key, kv_head, places, k_places, CHANNELS, 0, PIECE, True)
        mbarrier.wait(buffers.empty_v.index(stage), phase)
        tile_V, full = buffers.v.index(stage), buffers.full_v.index(stage)
        load_tile(values, values, tile_V, tile_V, full, key, kv_head, places, v_places, CHANNELS, 0, PIECE, True)


@gluon.jit
def _first_visible_key(seq_len, window, chunk):
    """Gluon's version of `attention.kernels.decode.plan.first_visible_key`."""
    return gl.maximum(gl.maximum(seq_len - window, (seq_len - 1) // chunk * chunk), 0)


@gluon.jit
def _unit_keys_of(seq_len, window, chunk, UNITS: gl.constexpr):
    """Gluon's version of `attention.kernels.decode.plan.unit_keys_of`."""
    unit_keys = UNITS.unit_keys + seq_len * 0
    if UNITS.max_units:
        most: gl.constexpr = UNITS.unit_keys * UNITS.max_units
        tile_stop = (seq_len + UNITS.tile_tokens - 1) // UNITS.tile_tokens * UNITS.tile_tokens
        visible = gl.minimum(gl.minimum(tile_stop, window), chunk)
        unit_keys *= gl.maximum((visible - 1) // most + 1, 1)
    return unit_keys


@gluon.jit
def _find_tile(query_start_ptr, num_reqs, tile, TOKENS: gl.constexpr, BLOCK_R: gl.constexpr):
    """Gluon's version of `attention.kernels.in_order.prompts`' way from a tile to its request."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_R // 128], [32], [4], [0])
    before = 0
    start = 0
    first_query = gl.load(query_start_ptr)
    while start < num_reqs:
        requests_R = start + gl.arange(0, BLOCK_R, layout=layout)
        exists_R = requests_R < num_reqs
        query_starts_R = gl.load(query_start_ptr + requests_R, mask=exists_R, other=0) - first_query
        first_tiles_R = query_starts_R // TOKENS + 2 * requests_R
        before += gl.sum(((first_tiles_R <= tile) & exists_R).to(gl.int32), 0)
        start += BLOCK_R
    request = gl.maximum(before - 1, 0)
    query_start = gl.load(query_start_ptr + request)
    query_len = gl.load(query_start_ptr + request + 1) - query_start
    return request, query_start, query_len, tile - ((query_start - first_query) // TOKENS + 2 * request)
