"""The Hopper kernel of attention over a batch: a warp that loads, and two warpgroups that multiply.

The loading warp brings tiles of keys and values with the bulk tensor copy engine into rings in shared memory. Each
warpgroup has 64 rows of a tile, and computes the softmax of one tile of keys while the tensor cores multiply the
weights of the previous tile. The kernel computes what `attention.kernels.paged.portable` computes, for 16-bit numbers;
the legend is the same, with A and P for the two parts of the key channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.paged.call import LOG2E, Call, LogSumExps, Requests, Tiles, rows_of, split_channels
from attention.kernels.tma_rows import TmaPlaces, as_rows

TILE_ROWS = 128


@dataclass(frozen=True)
class HopperTiling:
    """Attributes:
    block_n: keys of a tile, of which `stages` are in flight.
    pack: query heads of a kv head that share a tile's rows.
    """

    block_n: int
    stages: int
    pack: int


def choose_tiling(call: Call) -> HopperTiling:
    """Measured on an H200: 128 keys and two buffers are best where they fit, and heads share tiles at no cost."""
    channels = max(call.q_THD.shape[-1], call.keys.values.shape[-1])
    fits = channels <= 192 and call.keys.values.shape[-1] <= 128
    return HopperTiling(block_n=128 if fits else 64, stages=2, pack=min(call.group, TILE_ROWS))


class _Scoring(NamedTuple):
    """From products of queries and keys to scores, in powers of 2. None is not compiled.

    With a soft cap, a hyperbolic tangent, `scale2` has the factor 2 of its exponent.
    """

    scale2: float
    soft_cap2: float | None
    alibi_slopes_ptr: Tensor | None
    sinks_ptr: Tensor | None


class _Sizes(NamedTuple):
    """Constants. Key channels are padded and split into `block_a` and `block_p`, which may be 0; the copy engine takes
    `piece` keys at a time."""

    key_size: int
    value_size: int
    group: int
    pack: int
    block_a: int
    block_p: int
    block_v: int
    block_n: int
    piece: int
    stages: int


class _Buffers(NamedTuple):
    """Shared memory: the warpgroups' queries, the rings of keys and values, and their barriers."""

    q_A: gl.shared_memory_descriptor
    q_P: gl.shared_memory_descriptor
    k_A: gl.shared_memory_descriptor
    k_P: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    full_k: gl.shared_memory_descriptor
    empty_k: gl.shared_memory_descriptor
    full_v: gl.shared_memory_descriptor
    empty_v: gl.shared_memory_descriptor


class Tile(NamedTuple):
    """A program's queries, and keys [first_key, stop_key) that some of them see. `heads_left` of the kv head's query
    heads remain from `head` on."""

    query_start: gl.tensor
    query_len: gl.tensor
    first_token: gl.tensor
    kv_head: gl.tensor
    head: gl.tensor
    heads_left: gl.tensor
    seq_len: gl.tensor
    first_key: gl.tensor
    stop_key: gl.tensor


class RequestKeys(NamedTuple):
    """Where the loading warp finds one request's keys: from `key_start` on, or in the blocks of its table."""

    key_start: gl.tensor
    table_ptr: gl.tensor
    first_block: gl.tensor
    last_block: gl.tensor
    block_size: gl.tensor


class _Queries(NamedTuple):
    """A warpgroup's rows, as its softmax needs them; no slopes without ALiBi."""

    positions_M: gl.tensor
    slopes_M: gl.tensor | None
    seq_len: gl.tensor


class _Launch(NamedTuple):
    """The arguments of a call that both of these kernels have."""

    matrices: tuple[TensorDescriptor, TensorDescriptor | None, TensorDescriptor]
    scoring: _Scoring
    places: tuple[int, ...]
    sizes: _Sizes


def launch(call: Call, tiling: HopperTiling | None = None) -> bool:
    """Launches the kernel. Does nothing and returns False if it does not support the sizes or the keys' addresses and
    strides."""
    tiling = tiling or choose_tiling(call)
    prepared = prepare(call, tiling)
    if prepared is None:
        return False
    tiles = call.tiles(TILE_ROWS, tiling.pack)
    attend_tile[(tiles.num_tiles * tiles.num_packs,)](
        *prepared.matrices,
        rows_of(call.q_THD),
        rows_of(call.out),
        prepared.scoring,
        *call.lse,
        *call.requests,
        *tiles,
        call.keys.block_size or 1,
        *prepared.places,
        sizes=prepared.sizes,
        mask=call.mask,
        num_warps=4,
    )
    return True


def prepare(call: Call, tiling: HopperTiling) -> _Launch | None:
    """None if the kernels do not support the sizes or the keys' addresses and strides."""
    q_THD, keys, features = call.q_THD, call.keys, call.features
    head_size, value_size = q_THD.shape[-1], keys.values.shape[-1]
    if max(head_size, value_size) > 256 or min(head_size, value_size) < 64 or not _are_blocks_of_tiles(keys.block_size):
        return None
    k, v = as_rows(keys.keys), as_rows(keys.values)
    if k is None or v is None:
        return None
    block_a, block_p = split_channels(head_size)
    block_v = triton.next_power_of_2(value_size)
    piece = min(keys.block_size or tiling.block_n, tiling.block_n)
    soft_cap = features.logits_soft_cap
    return _Launch(
        matrices=(
            _descriptor(k.rows, piece, block_a),
            _descriptor(k.rows, piece, block_p) if block_p else None,
            _descriptor(v.rows, piece, block_v),
        ),
        scoring=_Scoring(
            call.scale * LOG2E * (2 / soft_cap if soft_cap else 1),
            soft_cap * LOG2E if soft_cap else None,
            features.alibi_slopes_H,
            features.sinks_H,
        ),
        places=(*k.places, *v.places),
        sizes=_Sizes(
            key_size=head_size,
            value_size=value_size,
            group=call.group,
            pack=tiling.pack,
            block_a=block_a,
            block_p=block_p,
            block_v=block_v,
            block_n=tiling.block_n,
            piece=piece,
            stages=tiling.stages,
        ),
    )


def _are_blocks_of_tiles(block_size: int) -> bool:
    """Whether a tile is whole blocks, or a block whole tiles. True without blocks (0)."""
    return block_size % 128 == 0 or block_size in (8, 16, 32, 64)


def _descriptor(rows: Tensor, piece: int, channels: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([piece, channels], dtype)
    return TensorDescriptor.from_tensor(rows, [piece, channels], layout)


@gluon.jit(
    do_not_specialize=[
        "lse_stride_h", "lse_stride_t", "num_reqs", "table_stride", "num_tiles", "num_packs", "section", "block_size",
        "k_row_b", "k_row_h", "k_col_h", "v_row_b", "v_row_h", "v_col_h",
    ],
    # After a batch's decodes these pointers may have any alignment.
    do_not_specialize_on_alignment=["query_start_ptr", "key_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)  # fmt: skip
def attend_tile(
    k_A,
    k_P,
    v_V,
    q,
    out,
    scoring,
    lse_ptr,
    lse_stride_h,
    lse_stride_t,
    num_reqs,
    query_start_ptr,
    key_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    table_stride,
    num_tiles,
    num_packs,
    section,
    block_size,
    k_row_b,
    k_row_h,
    k_col_h,
    v_row_b,
    v_row_h,
    v_col_h,
    sizes: gl.constexpr,
    mask: gl.constexpr,
):
    """One program: finds its tile of queries and divides the work among its warps."""
    lse = LogSumExps(lse_ptr, lse_stride_h, lse_stride_t)
    requests = Requests(num_reqs, query_start_ptr, key_start_ptr, seq_lens_ptr, block_table_ptr, table_stride)
    tiles = Tiles(num_tiles, num_packs, section)
    k_places, v_places = TmaPlaces(k_row_b, k_row_h, k_col_h), TmaPlaces(v_row_b, v_row_h, v_col_h)
    BLOCK_N: gl.constexpr = sizes.block_n
    PACK: gl.constexpr = sizes.pack
    TOKENS: gl.constexpr = 2 * 64 // PACK
    PACKS: gl.constexpr = (sizes.group + PACK - 1) // PACK
    pack, request, query_start, query_len, first_token = _find_tile(requests, tiles, TOKENS)
    if (first_token < 0) | (first_token >= query_len):
        return
    PAGED: gl.constexpr = requests.block_table_ptr is not None
    table_ptr = requests.query_start_ptr
    if not PAGED:
        key_start = gl.load(requests.key_start_ptr + request)
        seq_len = gl.load(requests.key_start_ptr + request + 1) - key_start
    else:
        key_start = 0
        seq_len = gl.load(requests.seq_lens_ptr + request)
        table_ptr = requests.block_table_ptr + request.to(gl.int64) * requests.table_stride
    first_position = seq_len - query_len + first_token
    last_position = gl.minimum(first_position + TOKENS, seq_len) - 1
    first_key, stop_key, _, _ = seen_by(first_position, last_position, seq_len, BLOCK_N, mask)
    kv_head = pack // PACKS
    head = kv_head * sizes.group + pack % PACKS * PACK
    heads_left = sizes.group - pack % PACKS * PACK

    buffers = new_buffers(k_A.dtype, sizes)
    tile = Tile(query_start, query_len, first_token, kv_head, head, heads_left, seq_len, first_key, stop_key)
    first_block, last_block = first_key // block_size, (seq_len - 1) // block_size
    keys = RequestKeys(key_start, table_ptr, first_block, last_block, block_size)
    gl.warp_specialize(
        [
            (_attend, (0, q, out, lse, scoring, buffers, tile, sizes, mask, PAGED)),
            (_attend, (1, q, out, lse, scoring, buffers, tile, sizes, mask, PAGED)),
            (_load_keys, (k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, sizes, PAGED)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def new_buffers(dtype: gl.constexpr, sizes: gl.constexpr):
    """Shared memory of a program, with its barriers initialised."""
    ROWS: gl.constexpr = 64
    BLOCK_N: gl.constexpr = sizes.block_n
    STAGES: gl.constexpr = sizes.stages
    layout_A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, sizes.block_a], dtype)
    layout_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, sizes.block_v], dtype)
    tiles_QA = gl.allocate_shared_memory(dtype, [2, ROWS, sizes.block_a], layout_A)
    tiles_A = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, sizes.block_a], layout_A)
    tiles_QP, tiles_P = tiles_QA, tiles_A
    if sizes.block_p:
        layout_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, sizes.block_p], dtype)
        tiles_QP = gl.allocate_shared_memory(dtype, [2, ROWS, sizes.block_p], layout_P)
        tiles_P = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, sizes.block_p], layout_P)
    tiles_V = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, sizes.block_v], layout_V)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=2)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_v.index(stage), count=2)

    return _Buffers(tiles_QA, tiles_QP, tiles_A, tiles_P, tiles_V, full_k, empty_k, full_v, empty_v)


@gluon.jit
def _find_tile(requests, tiles, TOKENS: gl.constexpr):
    """The program's pack of query heads, its request and first token; ordered and found as by the portable kernel."""
    BLOCK_R: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    num_tiles, num_packs, section = tiles.num_tiles, tiles.num_packs, tiles.section
    num_reqs, query_start_ptr = requests.num_reqs, requests.query_start_ptr
    program = gl.program_id(0)
    section_start = program // (section * num_tiles) * section
    in_section = program % (section * num_tiles)
    width = gl.minimum(section, num_packs - section_start)
    tile = num_tiles - 1 - in_section // width
    pack = section_start + in_section % width
    before = 0
    start = 0
    while start < num_reqs:
        requests_R = start + gl.arange(0, BLOCK_R, layout=layout)
        query_starts_R = gl.load(query_start_ptr + requests_R, mask=requests_R < num_reqs, other=0)
        first_tiles_R = query_starts_R // TOKENS + requests_R
        before += gl.sum(((first_tiles_R <= tile) & (requests_R < num_reqs)).to(gl.int32), 0)
        start += BLOCK_R
    request = gl.maximum(before - 1, 0)
    query_start = gl.load(query_start_ptr + request)
    query_len = gl.load(query_start_ptr + request + 1) - query_start
    return pack, request, query_start, query_len, (tile - (query_start // TOKENS + request)) * TOKENS


@gluon.jit
def seen_by(first_position, last_position, seq_len, BLOCK_N: gl.constexpr, mask: gl.constexpr):
    """Keys [first, stop) that some query between the positions sees, and tiles [full_start, full_stop) that all see."""
    CAUSAL: gl.constexpr = mask.causal
    WINDOW: gl.constexpr = mask.window
    CHUNK: gl.constexpr = mask.chunk
    first = 0
    full_first = 0
    if WINDOW:
        first = gl.maximum(first_position - WINDOW + 1, 0)
        full_first = gl.maximum(last_position - WINDOW + 1, 0)
    if CHUNK:
        first = gl.maximum(first_position // CHUNK * CHUNK, first)
        full_first = gl.maximum(last_position // CHUNK * CHUNK, full_first)
    stop = seq_len
    full_stop = seq_len
    if CAUSAL:
        stop = gl.maximum(last_position + 1, 0)
        full_stop = gl.maximum(first_position + 1, 0)
    elif WINDOW:
        stop = gl.maximum(gl.minimum(last_position + WINDOW, seq_len), 0)
        full_stop = gl.maximum(gl.minimum(first_position + WINDOW, seq_len), 0)
    return first, stop, gl.cdiv(full_first, BLOCK_N), full_stop // BLOCK_N


@gluon.jit
def _load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, sizes: gl.constexpr, PAGED: gl.constexpr):
    """The loading warp."""
    load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, 0, sizes, PAGED)


@gluon.jit
def load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, turn, sizes: gl.constexpr, PAGED: gl.constexpr):
    """Loads all tiles of keys and values, the last keys first, into the rings from place `turn` on."""
    BLOCK_N: gl.constexpr = sizes.block_n
    STAGES: gl.constexpr = sizes.stages
    PIECE: gl.constexpr = sizes.piece
    BLOCK_A: gl.constexpr = sizes.block_a
    BLOCK_P: gl.constexpr = sizes.block_p
    stop = gl.cdiv(tile.stop_key, BLOCK_N)
    for count in range(0, stop - tile.first_key // BLOCK_N):
        key = (stop - 1 - count) * BLOCK_N
        stage = (turn + count) % STAGES
        phase = (((turn + count) // STAGES) & 1) ^ 1
        mbarrier.wait(buffers.empty_k.index(stage), phase)
        tile_A, tile_P, full = buffers.k_A.index(stage), buffers.k_P.index(stage), buffers.full_k.index(stage)
        _load_tile(k_A, k_P, tile_A, tile_P, full, key, tile.kv_head, keys, k_places, BLOCK_A, BLOCK_P, PIECE, PAGED)
        mbarrier.wait(buffers.empty_v.index(stage), phase)
        tile_V, full = buffers.v.index(stage), buffers.full_v.index(stage)
        _load_tile(v_V, v_V, tile_V, tile_V, full, key, tile.kv_head, keys, v_places, sizes.block_v, 0, PIECE, PAGED)


@gluon.jit
def _load_tile(
    rows_A,
    rows_P,
    tile_A,
    tile_P,
    full,
    key,
    kv_head,
    keys,
    places,
    BLOCK_A: gl.constexpr,
    BLOCK_P: gl.constexpr,
    PIECE: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Starts the copies of a tile, `PIECE` keys of a block at a time."""
    BLOCK_N: gl.constexpr = tile_A.shape[0]
    mbarrier.expect(full, BLOCK_N * (BLOCK_A + BLOCK_P) * 2)
    for piece in gl.static_range(BLOCK_N // PIECE):
        row = key + piece * PIECE
        if not PAGED:
            row += keys.key_start
        else:
            # Only blocks that hold seen keys are looked up; for masked keys any block works.
            place = gl.maximum(gl.minimum(row // keys.block_size, keys.last_block), keys.first_block)
            block = gl.load(keys.table_ptr + place)
            row = block * places.row_b + row % keys.block_size
        row += kv_head * places.row_h
        target = tile_A.slice(piece * PIECE, PIECE, dim=0)
        tma.async_copy_global_to_shared(rows_A, [row, kv_head * places.col_h], full, target)
        if BLOCK_P:
            target_P = tile_P.slice(piece * PIECE, PIECE, dim=0)
            tma.async_copy_global_to_shared(rows_P, [row, kv_head * places.col_h + BLOCK_A], full, target_P)


@gluon.jit
def _attend(
    WARPGROUP: gl.constexpr,
    q,
    out,
    lse,
    scoring,
    buffers,
    tile,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
):
    """One warpgroup."""
    attend(WARPGROUP, q, out, lse, scoring, buffers, tile, 0, sizes, mask, PAGED, False)


@gluon.jit
def attend(
    WARPGROUP: gl.constexpr,
    q,
    out,
    lse,
    scoring,
    buffers,
    tile,
    turn,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
    GOES_ON: gl.constexpr,
):
    """One warpgroup's 64 of a tile's 128 rows. Keys and values are in the rings from place `turn` on; with GOES_ON, the
    last place is given back too, for another tile."""
    PACK: gl.constexpr = sizes.pack
    BLOCK_A: gl.constexpr = sizes.block_a
    BLOCK_P: gl.constexpr = sizes.block_p
    BLOCK_V: gl.constexpr = sizes.block_v
    BLOCK_N: gl.constexpr = sizes.block_n
    STAGES: gl.constexpr = sizes.stages
    LIMITED: gl.constexpr = mask.window != 0 or mask.chunk != 0
    ROWS: gl.constexpr = buffers.q_A.shape[1]
    FIRST: gl.constexpr = WARPGROUP * ROWS
    USED: gl.constexpr = 2 * ROWS // PACK * PACK
    dtype: gl.constexpr = buffers.k_A.dtype
    mma_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_V, 2)
    per_row: gl.constexpr = gl.SliceLayout(1, mma_N)
    per_row_V: gl.constexpr = gl.SliceLayout(1, mma_V)
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    query_start, query_len, seq_len = tile.query_start, tile.query_len, tile.seq_len
    first_token, head, heads_left = tile.first_token, tile.head, tile.heads_left
    tiles_A, tiles_P, tiles_V = buffers.k_A, buffers.k_P, buffers.v
    full_k, empty_k, full_v, empty_v = buffers.full_k, buffers.empty_k, buffers.full_v, buffers.empty_v

    rows_C = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copies))
    tokens_C = first_token + rows_C // PACK
    valid_C = (tokens_C < query_len) & (rows_C < USED) & (rows_C % PACK < heads_left)
    q_rows_C = (query_start + tokens_C).to(gl.int64) * q.stride_t + (head + rows_C % PACK) * q.stride_h
    q_A = buffers.q_A.index(WARPGROUP)
    q_P = buffers.q_P.index(WARPGROUP)
    _load_queries(q.ptr + q_rows_C, q_A, q_P, valid_C, copies, sizes.key_size, BLOCK_P)

    rows_M = FIRST + gl.arange(0, ROWS, layout=per_row)
    tokens_M = first_token + rows_M // PACK
    positions_M = seq_len - query_len + tokens_M
    heads_M = head + rows_M % PACK
    valid_M = (tokens_M < query_len) & (rows_M < USED) & (rows_M % PACK < heads_left)
    slopes_M = None
    if scoring.alibi_slopes_ptr is not None:
        slopes_M = gl.load(scoring.alibi_slopes_ptr + heads_M, mask=valid_M, other=0.0) * 1.4426950408889634
    if scoring.sinks_ptr is not None:
        max_M = gl.load(scoring.sinks_ptr + heads_M, mask=valid_M, other=0.0).to(gl.float32) * 1.4426950408889634
        sum_M = gl.full([ROWS], 1.0, gl.float32, layout=per_row)
    else:
        max_M = gl.full([ROWS], -float("inf"), gl.float32, layout=per_row)
        sum_M = gl.zeros([ROWS], gl.float32, layout=per_row)
    acc_MV = gl.zeros([ROWS, BLOCK_V], gl.float32, layout=mma_V)
    queries = _Queries(positions_M, slopes_M, seq_len)

    start, stop = tile.first_key // BLOCK_N, gl.cdiv(tile.stop_key, BLOCK_N)
    if start < stop:
        first_position = seq_len - query_len + first_token + FIRST // PACK
        last_position = seq_len - query_len + gl.minimum(first_token + (FIRST + ROWS - 1) // PACK, query_len - 1)
        _, _, full_start, full_stop = seen_by(first_position, last_position, seq_len, BLOCK_N, mask)
        full_stop = gl.minimum(full_stop, stop - 1)
        full_start = gl.maximum(gl.minimum(full_start, full_stop), start)

        stage, phase = turn % STAGES, (turn // STAGES) & 1
        mbarrier.wait(full_k.index(stage), phase)
        scores = _multiply_keys(q_A, q_P, tiles_A.index(stage), tiles_P.index(stage), BLOCK_P, mma_N)
        scores_MN = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty_k.index(stage), count=1)
        weights_MN, max_M, sum_M, rescale_M = _softmax(
            scores_MN, max_M, sum_M, (stop - 1) * BLOCK_N, queries, scoring, mask, True
        )
        weights = gl.convert_layout(weights_MN.to(dtype), operand)
        if seq_len < stop * BLOCK_N:
            mbarrier.wait(full_v.index(stage), phase)
            _keep_rows(tiles_V.index(stage), 0, seq_len - (stop - 1) * BLOCK_N, BLOCK_N, BLOCK_V)

        # Tiles from the last to the first: tiles on the diagonal, tiles that all rows see, tiles that windows cut.
        count = 0
        for part in gl.static_range(3):
            if part != 2 or LIMITED:
                part_start = full_stop if part == 0 else full_start if part == 1 else start
                part_stop = stop - 1 if part == 0 else full_stop if part == 1 else full_start
                for _ in range(part_start, part_stop):
                    last_stage, last_phase = (turn + count) % STAGES, ((turn + count) // STAGES) & 1
                    count += 1
                    stage, phase = (turn + count) % STAGES, ((turn + count) // STAGES) & 1
                    mbarrier.wait(full_k.index(stage), phase)
                    scores = _multiply_keys(q_A, q_P, tiles_A.index(stage), tiles_P.index(stage), BLOCK_P, mma_N)
                    mbarrier.wait(full_v.index(last_stage), last_phase)
                    acc = warpgroup_mma(weights, tiles_V.index(last_stage), acc_MV, is_async=True)
                    scores_MN = warpgroup_mma_wait(1, deps=(scores,))
                    mbarrier.arrive(empty_k.index(stage), count=1)
                    weights_MN, max_M, sum_M, rescale_M = _softmax(
                        scores_MN, max_M, sum_M, (stop - 1 - count) * BLOCK_N, queries, scoring, mask, part != 1
                    )
                    acc_MV = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(empty_v.index(last_stage), count=1)
                    acc_MV *= gl.convert_layout(rescale_M, per_row_V)[:, None]
                    weights = gl.convert_layout(weights_MN.to(dtype), operand)
        last_stage, last_phase = (turn + count) % STAGES, ((turn + count) // STAGES) & 1
        mbarrier.wait(full_v.index(last_stage), last_phase)
        if PAGED and LIMITED and start * BLOCK_N < tile.first_key:
            _keep_rows(tiles_V.index(last_stage), tile.first_key - start * BLOCK_N, BLOCK_N, BLOCK_N, BLOCK_V)
        acc = warpgroup_mma(weights, tiles_V.index(last_stage), acc_MV, is_async=True)
        acc_MV = warpgroup_mma_wait(0, deps=(acc,))
        if GOES_ON:
            mbarrier.arrive(empty_v.index(last_stage), count=1)

    # For a query that saw no key the output is 0, and the log-sum-exp is `max_M`, which is -inf.
    total_M = gl.where(sum_M == 0.0, 1.0, sum_M)
    acc_MV *= gl.convert_layout(1.0 / total_M, per_row_V)[:, None]
    out_ptr = out.ptr + query_start.to(gl.int64) * out.stride_t + head * out.stride_h
    if BLOCK_V == BLOCK_A:
        # The result passes through the queries' memory, for stores of 16 bytes.
        q_A.store(acc_MV.to(dtype))
        out_rows_C = tokens_C.to(gl.int64) * out.stride_t + rows_C % PACK * out.stride_h
        _store(out_ptr, out_rows_C, q_A.load(copies), valid_C, sizes.value_size)
    else:
        out_rows_M = tokens_M.to(gl.int64) * out.stride_t + rows_M % PACK * out.stride_h
        out_rows_V = gl.convert_layout(out_rows_M, per_row_V)
        _store(out_ptr, out_rows_V, acc_MV, gl.convert_layout(valid_M, per_row_V), sizes.value_size)
    if lse.ptr is not None:
        lse_M = (max_M + gl.log2(total_M)) / 1.4426950408889634
        lse_rows_M = heads_M.to(gl.int64) * lse.stride_h + (query_start + tokens_M) * lse.stride_t
        gl.store(lse.ptr + lse_rows_M, lse_M, mask=valid_M)


@gluon.jit
def _load_queries(q_rows, q_A, q_P, valid, layout: gl.constexpr, KEY_SIZE: gl.constexpr, BLOCK_P: gl.constexpr):
    BLOCK_A: gl.constexpr = q_A.shape[1]
    channels = gl.arange(0, BLOCK_A, layout=gl.SliceLayout(0, layout))
    mask = valid[:, None] & (channels < KEY_SIZE)[None, :]
    q_A.store(gl.load(q_rows[:, None] + channels[None, :], mask=mask, other=0.0))
    if BLOCK_P:
        channels_P = BLOCK_A + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, layout))
        mask_P = valid[:, None] & (channels_P < KEY_SIZE)[None, :]
        q_P.store(gl.load(q_rows[:, None] + channels_P[None, :], mask=mask_P, other=0.0))
    fence_async_shared()


@gluon.jit
def _store(pointer, rows, acc, valid, VALUE_SIZE: gl.constexpr):
    channels = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    mask = valid[:, None] & (channels < VALUE_SIZE)[None, :]
    gl.store(pointer + rows[:, None] + channels[None, :], acc.to(pointer.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply_keys(q_A, q_P, tile_A, tile_P, BLOCK_P: gl.constexpr, layout: gl.constexpr):
    """The scores, not waited for."""
    ROWS: gl.constexpr = q_A.shape[0]
    BLOCK_N: gl.constexpr = tile_A.shape[0]
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    scores = warpgroup_mma(q_A, tile_A.permute((1, 0)), scores, use_acc=False, is_async=True)
    if BLOCK_P:
        scores = warpgroup_mma(q_P, tile_P.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _softmax(scores_MN, max_M, sum_M, first_key, queries, scoring, mask: gl.constexpr, MASKED: gl.constexpr):
    """A tile's weights, the rows' new maximum and sum, and the factor for earlier results; all in powers of 2."""
    WINDOW: gl.constexpr = mask.window
    CHUNK: gl.constexpr = mask.chunk
    SOFT_CAP: gl.constexpr = scoring.soft_cap2 is not None
    ALIBI: gl.constexpr = queries.slopes_M is not None
    positions_M, scale2 = queries.positions_M, scoring.scale2
    keys_N = first_key + gl.arange(0, scores_MN.shape[1], layout=gl.SliceLayout(0, scores_MN.type.layout))
    if SOFT_CAP:
        scores_MN = scoring.soft_cap2 * (1.0 - 2.0 / (gl.exp2(scores_MN * scale2) + 1.0))
    elif ALIBI:
        scores_MN *= scale2
    if ALIBI:
        scores_MN += queries.slopes_M[:, None] * (keys_N[None, :] - positions_M[:, None]).to(gl.float32)
    if MASKED:
        seen_MN = (keys_N < queries.seq_len)[None, :]
        if mask.causal:
            seen_MN = seen_MN & (keys_N[None, :] <= positions_M[:, None])
        elif WINDOW:
            seen_MN = seen_MN & (keys_N[None, :] < positions_M[:, None] + WINDOW)
        if WINDOW:
            seen_MN = seen_MN & (keys_N[None, :] > positions_M[:, None] - WINDOW)
        if CHUNK:
            seen_MN = seen_MN & (keys_N[None, :] >= (positions_M // CHUNK * CHUNK)[:, None])
        scores_MN = gl.where(seen_MN, scores_MN, -float("inf"))
    highest_M = gl.max(scores_MN, 1)
    if not (SOFT_CAP or ALIBI):
        highest_M *= scale2
    new_max_M = gl.maximum(max_M, highest_M)
    base_M = new_max_M
    if MASKED:
        # For a query that has seen no key yet, -inf minus -inf would be NaN.
        base_M = gl.where(new_max_M == -float("inf"), 0.0, new_max_M)
    if SOFT_CAP or ALIBI:
        weights_MN = gl.exp2(scores_MN - base_M[:, None])
    else:
        weights_MN = gl.exp2(scores_MN * scale2 - base_M[:, None])
    rescale_M = gl.exp2(max_M - base_M)
    return weights_MN, new_max_M, sum_M * rescale_M + gl.sum(weights_MN, 1), rescale_M


@gluon.jit
def _keep_rows(tile, first, stop, BLOCK_N: gl.constexpr, CHANNELS: gl.constexpr):
    """Clears values that no query sees, which may be NaN: a weight of 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    for start in gl.static_range(0, CHANNELS, 64):
        part = tile.slice(start, 64, dim=1)
        part.store(gl.where(((rows >= first) & (rows < stop))[:, None], part.load(layout), 0.0))
    fence_async_shared()
