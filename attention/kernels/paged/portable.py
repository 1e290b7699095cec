"""The portable kernel of attention over a batch: how its tiles are cut, its launch, and what its programs do.

It has every feature; features that a call does not use are not compiled. Legend: R requests, M rows of a tile (tokens
times the query heads that share a kv head), N keys of a tile, D and P the two parts of the key channels, V value
channels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.paged.call import Call, LogSumExps, Requests, Tiles, rows_of, split_channels
from kvcache.fp8 import is_fp8
from tritonlib.fp8 import from_fp8
from tritonlib.launch import bound, interpreted
from tritonlib.math import tanh

_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Tiling:
    """Attributes:
    block_m, block_n: rows and keys of a tile; `pack` query heads of a kv head share the rows.
    """

    block_m: int
    block_n: int
    pack: int
    num_warps: int
    num_stages: int


def choose_tiling(call: Call) -> Tiling:
    """The first shape that fits, fastest first, as measured on an H200."""
    element_bytes = 2 if is_fp8(call.q_THD) else call.q_THD.element_size()
    rows = max(16, triton.next_power_of_2(call.max_query_len * call.group))
    # Products of float32 are unrolled into registers, and spill unless tiles are small.
    block_m = min(rows, 32 if element_bytes > 2 else 128)
    key_channels = sum(split_channels(call.q_THD.shape[-1]))
    channels = key_channels + triton.next_power_of_2(call.keys.values.shape[-1])
    room = _shared_bytes(call.q_THD.device) - block_m * key_channels * element_bytes
    shapes = ((16, 2),) if element_bytes > 2 else ((64, 3), (64, 2), (32, 2))
    fitting = (shape for shape in shapes if shape[0] * shape[1] * channels * element_bytes <= room)
    block_n, num_stages = next(fitting, (16, 1))
    return Tiling(
        block_m=block_m,
        block_n=block_n,
        pack=min(call.group, block_m),
        num_warps=8 if block_m == 128 else 4,
        num_stages=num_stages,
    )


def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program's tiles may fill; the driver takes 1 KB, reductions 2 KB."""
    if device.type != "cuda":
        return 64 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 3 * 1024


class _KeyRows(NamedTuple):
    """Keys or values [B, N, H, channels], channels adjacent."""

    ptr: Tensor
    stride_b: int
    stride_n: int
    stride_h: int


class _Scoring(NamedTuple):
    """From products of queries and keys to scores, and from weights to outputs. None is not compiled."""

    scale: float
    soft_cap: float | None
    alibi_slopes_ptr: Tensor | None
    sinks_ptr: Tensor | None
    q_scale_ptr: Tensor | None
    k_scale_ptr: Tensor | None
    v_scale_ptr: Tensor | None


class _Sizes(NamedTuple):
    """Constants. In a tile, `pack` query heads share `block_m` rows. Channels are padded; key channels are split into
    `block_d` and `block_p`, which may be 0. `block_size` is the cache's, 0 without blocks."""

    key_size: int
    value_size: int
    group: int
    pack: int
    block_size: int
    block_m: int
    block_n: int
    block_d: int
    block_p: int
    block_v: int
    block_r: int


class _Queries(NamedTuple):
    """A tile's queries, in two parts of channels; no slopes without ALiBi."""

    q_MD: tl.tensor
    q_MP: tl.tensor
    positions_M: tl.tensor
    slopes_M: tl.tensor | None


class _RequestKeys(NamedTuple):
    """One kv head's keys of one request; `first_key` is the first that a query of the tile sees."""

    k: _KeyRows
    v: _KeyRows
    table_ptr: tl.tensor
    first_key: tl.tensor
    seq_len: tl.tensor


class _Types(NamedTuple):
    """Constants: the dtypes in which keys and values are multiplied."""

    k: tl.dtype
    v: tl.dtype
    interpreted: bool


def launch(call: Call, tiling: Tiling | None = None) -> None:
    tiling = tiling or choose_tiling(call)
    q_THD, keys, features = call.q_THD, call.keys, call.features
    head_size, value_size = q_THD.shape[-1], keys.values.shape[-1]
    block_d, block_p = split_channels(head_size)
    tiles = call.tiles(tiling.block_m, tiling.pack)
    attend_tile[(tiles.num_tiles * tiles.num_packs,)](
        rows_of(q_THD),
        _KeyRows(keys.keys, *keys.keys.stride()[:3]),
        _KeyRows(keys.values, *keys.values.stride()[:3]),
        rows_of(call.out),
        _Scoring(
            call.scale,
            features.logits_soft_cap,
            features.alibi_slopes_H,
            features.sinks_H,
            features.q_scale,
            features.k_scale,
            features.v_scale,
        ),
        *call.lse,
        *call.requests,
        *tiles,
        sizes=_Sizes(
            key_size=head_size,
            value_size=value_size,
            group=call.group,
            pack=tiling.pack,
            block_size=keys.block_size,
            block_m=tiling.block_m,
            block_n=tiling.block_n,
            block_d=block_d,
            block_p=block_p,
            block_v=max(16, triton.next_power_of_2(value_size)),
            block_r=min(256, max(16, triton.next_power_of_2(call.num_reqs))),
        ),
        mask=call.mask,
        types=_multiplied_as(q_THD.dtype, keys.keys.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _multiplied_as(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> _Types:
    """The dtypes of both products. 8-bit numbers are multiplied in float16, which represents all of them."""
    if interpreted():
        return _Types(tl.float32, tl.float32, interpreted=True)
    k_type = _TRITON_TYPES.get(q_dtype, _TRITON_TYPES.get(kv_dtype, tl.float16))
    v_type = _TRITON_TYPES.get(kv_dtype, tl.float32 if q_dtype == torch.float32 else tl.float16)
    return _Types(k_type, v_type, interpreted=False)


@triton.jit(
    do_not_specialize=["lse_stride_h", "lse_stride_t", "num_reqs", "table_stride", "num_tiles", "num_packs", "section"],
    # After a batch's decodes these pointers may have any alignment, and a table is as wide as its longest request.
    do_not_specialize_on_alignment=["query_start_ptr", "key_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def attend_tile(
    q,
    k,
    v,
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
    sizes: tl.constexpr,
    mask: tl.constexpr,
    types: tl.constexpr,
):
    """Attends for one tile. With a block table, keys are in the cache's blocks; else they begin at `key_start_ptr`.

    Tiles go through few kv heads at a time, so that their keys stay in the L2 cache, and through a request's last
    queries first, which have most to do.
    """
    lse = LogSumExps(lse_ptr, lse_stride_h, lse_stride_t)
    requests = Requests(num_reqs, query_start_ptr, key_start_ptr, seq_lens_ptr, block_table_ptr, table_stride)
    tiles = Tiles(num_tiles, num_packs, section)
    GROUP: tl.constexpr = sizes.group
    PACK: tl.constexpr = sizes.pack
    BLOCK_M: tl.constexpr = sizes.block_m
    BLOCK_N: tl.constexpr = sizes.block_n
    BLOCK_D: tl.constexpr = sizes.block_d
    BLOCK_P: tl.constexpr = sizes.block_p
    BLOCK_V: tl.constexpr = sizes.block_v
    KEY_SIZE: tl.constexpr = sizes.key_size
    WINDOW: tl.constexpr = mask.window
    CHUNK: tl.constexpr = mask.chunk
    TOKENS: tl.constexpr = BLOCK_M // PACK
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    pid = tl.program_id(0)
    section_start = pid // (tiles.section * tiles.num_tiles) * tiles.section
    in_section = pid % (tiles.section * tiles.num_tiles)
    width = tl.minimum(tiles.section, tiles.num_packs - section_start)
    tile = tiles.num_tiles - 1 - in_section // width
    pack = section_start + in_section % width
    kv_head = pack // PACKS
    request, query_start, query_len, first_token = _find_tile(requests, tile, TOKENS, sizes.block_r)
    if (first_token < 0) | (first_token >= query_len):
        return

    k_ptr = k.ptr
    v_ptr = v.ptr
    if requests.block_table_ptr is None:
        key_start = tl.load(requests.key_start_ptr + request).to(tl.int64)
        seq_len = tl.load(requests.key_start_ptr + request + 1) - key_start.to(tl.int32)
        table_ptr = requests.query_start_ptr
        k_ptr += key_start * k.stride_n
        v_ptr += key_start * v.stride_n
    else:
        seq_len = tl.load(requests.seq_lens_ptr + request)
        table_ptr = requests.block_table_ptr + request.to(tl.int64) * requests.table_stride
    k_ptr += kv_head.to(tl.int64) * k.stride_h
    v_ptr += kv_head.to(tl.int64) * v.stride_h

    rows_M = tl.arange(0, BLOCK_M)
    tokens_M = first_token + rows_M // PACK
    group_M = pack % PACKS * PACK + rows_M % PACK
    heads_M = kv_head * GROUP + group_M
    valid_M = (tokens_M < query_len) & (rows_M < TOKENS * PACK) & (group_M < GROUP)
    first_position = seq_len - query_len + first_token
    positions_M = seq_len - query_len + tokens_M
    last_position = tl.minimum(first_position + TOKENS, seq_len) - 1

    # Keys [start, stop) are seen by some query of the tile, keys [full_start, full_stop) by all.
    start = seq_len * 0
    full_start = start
    if WINDOW:
        start = tl.maximum(start, first_position - WINDOW + 1)
        full_start = tl.maximum(full_start, last_position - WINDOW + 1)
    if CHUNK:
        start = tl.maximum(start, first_position // CHUNK * CHUNK)
        full_start = tl.maximum(full_start, last_position // CHUNK * CHUNK)
    stop = seq_len
    full_stop = seq_len
    if mask.causal:
        stop = tl.maximum(last_position + 1, 0)
        full_stop = tl.maximum(first_position + 1, 0)
    elif WINDOW:
        stop = tl.maximum(tl.minimum(last_position + WINDOW, seq_len), 0)
        full_stop = tl.maximum(tl.minimum(first_position + WINDOW, seq_len), 0)
    first_key = start
    start = start // BLOCK_N * BLOCK_N
    full_stop = full_stop // BLOCK_N * BLOCK_N
    full_start = tl.minimum((full_start + BLOCK_N - 1) // BLOCK_N * BLOCK_N, tl.maximum(full_stop, start))
    full_stop = tl.maximum(full_stop, full_start)

    scale = scoring.scale
    if scoring.q_scale_ptr is not None:
        scale *= tl.load(scoring.q_scale_ptr)
    if scoring.k_scale_ptr is not None:
        scale *= tl.load(scoring.k_scale_ptr)
    slopes_M = None
    if scoring.alibi_slopes_ptr is not None:
        slopes_M = tl.load(scoring.alibi_slopes_ptr + heads_M, mask=valid_M, other=0.0) * 1.4426950408889634
    q_rows_ptr = q.ptr + query_start.to(tl.int64) * q.stride_t
    q_rows_M = tokens_M.to(tl.int64) * q.stride_t + heads_M * q.stride_h
    q_MD = _in_type(_load_rows(q_rows_ptr, q_rows_M, valid_M, KEY_SIZE, BLOCK_D, True), types.k, types.interpreted)
    q_MP = q_MD
    if BLOCK_P:
        q_MP = _load_rows(q_rows_ptr + BLOCK_D, q_rows_M, valid_M, KEY_SIZE - BLOCK_D, BLOCK_P, True)
        q_MP = _in_type(q_MP, types.k, types.interpreted)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if scoring.sinks_ptr is not None:
        max_M = tl.load(scoring.sinks_ptr + heads_M, mask=valid_M, other=0.0).to(tl.float32) * 1.4426950408889634
        sum_M = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
    queries = _Queries(q_MD, q_MP, positions_M, slopes_M)
    k_rows = _KeyRows(k_ptr, k.stride_b, k.stride_n, k.stride_h)
    v_rows = _KeyRows(v_ptr, v.stride_b, v.stride_n, v.stride_h)
    keys = _RequestKeys(k_rows, v_rows, table_ptr, first_key, seq_len)
    for part in tl.static_range(3):
        if part != 0 or WINDOW or CHUNK:
            acc_MV, max_M, sum_M = _attend_keys(
                acc_MV,
                max_M,
                sum_M,
                queries,
                keys,
                start if part == 0 else full_start if part == 1 else full_stop,
                full_start if part == 0 else full_stop if part == 1 else stop,
                scale,
                scoring.soft_cap,
                sizes,
                mask,
                types,
                part != 1,
            )

    # For a query that saw no key the output is 0, and the log-sum-exp is `max_M`, which is -inf.
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    factor_M = 1.0 / total_M
    if scoring.v_scale_ptr is not None:
        factor_M *= tl.load(scoring.v_scale_ptr)
    channels_V = tl.arange(0, BLOCK_V)
    out_M = (query_start + tokens_M).to(tl.int64) * out.stride_t + heads_M * out.stride_h
    tl.store(
        out.ptr + out_M[:, None] + channels_V[None, :],
        (acc_MV * factor_M[:, None]).to(out.ptr.dtype.element_ty),
        mask=valid_M[:, None] & (channels_V < sizes.value_size)[None, :],
    )
    if lse.ptr is not None:
        lse_M = (max_M + tl.log2(total_M)) / 1.4426950408889634
        lse_places_M = heads_M.to(tl.int64) * lse.stride_h + (query_start + tokens_M) * lse.stride_t
        tl.store(lse.ptr + lse_places_M, lse_M, mask=valid_M)


@triton.jit
def _find_tile(requests, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """(request, where its queries start, how many it has, the tile's first token among them).

    Every request has one tile more than it fills, so that a tile's request follows from the query starts alone. A tile
    may therefore begin past its request's last token; or below 0, before the first request, because the query starts
    need not begin with 0.
    """
    before = 0
    start = 0
    while start < requests.num_reqs:
        requests_R = start + tl.arange(0, BLOCK_R)
        exists_R = requests_R < requests.num_reqs
        query_starts_R = tl.load(requests.query_start_ptr + requests_R, mask=exists_R, other=0)
        first_tiles_R = query_starts_R // TOKENS + requests_R
        before += tl.sum(((first_tiles_R <= tile) & exists_R).to(tl.int32), 0)
        start += BLOCK_R
    request = tl.maximum(before - 1, 0)
    query_start = tl.load(requests.query_start_ptr + request)
    query_len = tl.load(requests.query_start_ptr + request + 1) - query_start
    return request, query_start, query_len, (tile - (query_start // TOKENS + request)) * TOKENS


@triton.jit
def _attend_keys(
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
    """Adds keys [start, stop) to the online softmax; every query sees every one of them unless MASKED."""
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
        # Looked up one tile ahead: an address that is loaded in the same iteration would halve the loads in flight.
        blocks = _find_blocks(keys, tile + BLOCK_N, BLOCK_SIZE, BLOCK_N)
        k_ND = _load_rows(k_tile_ptr, k_rows_N, exists_N, KEY_SIZE, BLOCK_D, MASKED)
        k_ND = _in_type(k_ND, types.k, INTERPRETED)
        scores_MN = tl.dot(queries.q_MD, tl.trans(k_ND), input_precision="ieee")
        if BLOCK_P:
            k_NP = _load_rows(k_tile_ptr + BLOCK_D, k_rows_N, exists_N, KEY_SIZE - BLOCK_D, BLOCK_P, MASKED)
            k_NP = _in_type(k_NP, types.k, INTERPRETED)
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
        v_NV = _load_rows(v_tile_ptr, v_rows_N, exists_N, sizes.value_size, sizes.block_v, MASKED)
        v_NV = _in_type(v_NV, types.v, INTERPRETED)
        acc_MV = tl.dot(weights_MN.to(types.v), v_NV, acc_MV, input_precision="ieee")
        max_M = new_max_M
    return acc_MV, max_M, sum_M


@triton.jit
def _find_blocks(keys, tile, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of a tile's keys: one number where a block holds whole tiles, else one for each key. A key that must
    not be read gets the nearest block that may be read."""
    if BLOCK_SIZE == 0:
        return 0
    elif BLOCK_SIZE % BLOCK_N == 0:  # noqa: RET505 (branches of the compiler)
        place = tl.minimum(tl.maximum(tile, keys.first_key), keys.seq_len - 1) // BLOCK_SIZE
        return tl.load(keys.table_ptr + tl.maximum(place, 0)).to(tl.int64)
    else:
        keys_N = tl.minimum(tl.maximum(tile + tl.arange(0, BLOCK_N), keys.first_key), keys.seq_len - 1)
        return tl.load(keys.table_ptr + tl.maximum(keys_N, 0) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def _load_rows(pointer, places_N, mask_N, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[N, BLOCK] channels of the given rows; 0 where there is nothing to read."""
    channels = tl.arange(0, BLOCK)
    places = pointer + places_N[:, None] + channels[None, :]
    if MASKED:
        return tl.load(places, mask=mask_N[:, None] & (channels < SIZE)[None, :], other=0.0)
    if SIZE < BLOCK:
        return tl.load(places, mask=(channels < SIZE)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def _in_type(stored, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    if stored.dtype.primitive_bitwidth == 8:
        return from_fp8(stored, INTERPRETED).to(dtype)
    return stored.to(dtype)
