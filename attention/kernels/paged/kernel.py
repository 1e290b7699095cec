"""Attention of a tile of queries over its request's keys, wherever these lie: in a paged cache or side by side.

The portable kernel behind `unified` and `ragged`, with every feature; what is not asked for is not compiled. Knows no
batch beyond where queries and keys lie. Legend: R requests, M rows of a tile (tokens times the query heads that share a
kv head), N keys of a tile, D key channels, V value channels.
"""

import triton
import triton.language as tl

from attention.kernels.paged.parts import find_blocks, find_tile, in_type, load_rows, tanh
from tritonlib.launch import bound


@triton.jit
def _attend_keys(
    acc_MV,
    max_M,
    sum_M,
    q_MD,
    q_MP,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    stop,
    first_key,
    seq_len,
    positions_M,
    slopes_M,
    scale,
    soft_cap,
    stride_k_b,
    stride_k_n,
    stride_v_b,
    stride_v_n,
    KEY_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
    k_type: tl.constexpr,
    v_type: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Keys [start, stop), of which every query sees every one unless MASKED."""
    own_N = tl.arange(0, BLOCK_N)
    blocks = find_blocks(table_ptr, start, first_key, seq_len, BLOCK_SIZE, BLOCK_N)
    for tile in tl.range(bound(start, INTERPRETED), bound(stop, INTERPRETED), BLOCK_N):
        keys_N = tile + own_N
        exists_N = (keys_N >= first_key) & (keys_N < seq_len)
        if BLOCK_SIZE == 0:
            tile64 = tl.full([], tile, tl.int64)
            k_tile_ptr = k_ptr + tile64 * stride_k_n
            v_tile_ptr = v_ptr + tile64 * stride_v_n
            k_rows_N = own_N * stride_k_n
            v_rows_N = own_N * stride_v_n
        elif BLOCK_SIZE % BLOCK_N == 0:
            k_tile_ptr = k_ptr + (blocks * stride_k_b + tile % BLOCK_SIZE * stride_k_n)
            v_tile_ptr = v_ptr + (blocks * stride_v_b + tile % BLOCK_SIZE * stride_v_n)
            k_rows_N = own_N * stride_k_n
            v_rows_N = own_N * stride_v_n
        else:
            k_tile_ptr = k_ptr
            v_tile_ptr = v_ptr
            k_rows_N = blocks * stride_k_b + keys_N % BLOCK_SIZE * stride_k_n
            v_rows_N = blocks * stride_v_b + keys_N % BLOCK_SIZE * stride_v_n
        # Looked up one tile ahead: an address that is loaded in the same turn would halve the loads in flight.
        blocks = find_blocks(table_ptr, tile + BLOCK_N, first_key, seq_len, BLOCK_SIZE, BLOCK_N)
        k_ND = load_rows(k_tile_ptr, k_rows_N, exists_N, KEY_SIZE, BLOCK_D, MASKED)
        k_ND = in_type(k_ND, k_type, INTERPRETED)
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if BLOCK_P:
            k_NP = load_rows(k_tile_ptr + BLOCK_D, k_rows_N, exists_N, KEY_SIZE - BLOCK_D, BLOCK_P, MASKED)
            k_NP = in_type(k_NP, k_type, INTERPRETED)
            scores_MN = tl.dot(q_MP, tl.trans(k_NP), scores_MN, input_precision="ieee")
        if SOFT_CAP:
            scores_MN = soft_cap * tanh(scores_MN * (scale / soft_cap)) * 1.4426950408889634
        elif ALIBI:
            scores_MN *= scale * 1.4426950408889634
        if ALIBI:
            scores_MN += slopes_M[:, None] * (keys_N[None, :] - positions_M[:, None]).to(tl.float32)
        if MASKED:
            seen_MN = exists_N[None, :]
            if CAUSAL:
                seen_MN = seen_MN & (keys_N[None, :] <= positions_M[:, None])
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
            # A query that has seen nothing yet: -inf minus -inf would be NaN.
            safe_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        if SOFT_CAP or ALIBI:
            weights_MN = tl.exp2(scores_MN - safe_max_M[:, None])
        else:
            weights_MN = tl.exp2(scores_MN * (scale * 1.4426950408889634) - safe_max_M[:, None])
        rescale_M = tl.exp2(max_M - safe_max_M)
        sum_M = sum_M * rescale_M + tl.sum(weights_MN, 1)
        acc_MV = acc_MV * rescale_M[:, None]
        v_NV = load_rows(v_tile_ptr, v_rows_N, exists_N, VALUE_SIZE, BLOCK_V, MASKED)
        v_NV = in_type(v_NV, v_type, INTERPRETED)
        acc_MV = tl.dot(weights_MN.to(v_type), v_NV, acc_MV, input_precision="ieee")
        max_M = new_max_M
    return acc_MV, max_M, sum_M


@triton.jit(
    do_not_specialize=["num_reqs", "num_tiles", "section", "stride_lse_h", "stride_lse_t", "stride_table_r"],
    # Behind a batch's decodes they begin anywhere, and a table is as wide as its longest request.
    do_not_specialize_on_alignment=["query_start_ptr", "key_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def attend_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    key_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    soft_cap,
    num_reqs,
    num_tiles,
    num_heads,
    section,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_n,
    stride_k_h,
    stride_v_b,
    stride_v_n,
    stride_v_h,
    stride_out_t,
    stride_out_h,
    stride_lse_h,
    stride_lse_t,
    stride_table_r,
    KEY_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    k_type: tl.constexpr,
    v_type: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Keys are in the cache's blocks where there is a block table, else at `key_start_ptr`.

    PACK query heads of a kv head share a tile. The order of the tiles: few kv heads at a time, so that their keys stay
    in the L2 cache, and a request's last queries first, which have most to do.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    pid = tl.program_id(0)
    num_packs = num_heads // GROUP * PACKS
    section_start = pid // (section * num_tiles) * section
    in_section = pid % (section * num_tiles)
    width = tl.minimum(section, num_packs - section_start)
    tile = num_tiles - 1 - in_section // width
    pack = section_start + in_section % width
    kv_head = pack // PACKS
    request, query_start, query_len, first_token = find_tile(query_start_ptr, tile, num_reqs, TOKENS, BLOCK_R)
    if (first_token < 0) | (first_token >= query_len):
        return

    if block_table_ptr is None:
        key_start = tl.load(key_start_ptr + request).to(tl.int64)
        seq_len = tl.load(key_start_ptr + request + 1) - key_start.to(tl.int32)
        table_ptr = query_start_ptr
        k_ptr += key_start * stride_k_n
        v_ptr += key_start * stride_v_n
    else:
        seq_len = tl.load(seq_lens_ptr + request)
        table_ptr = block_table_ptr + request.to(tl.int64) * stride_table_r
    k_ptr += kv_head.to(tl.int64) * stride_k_h
    v_ptr += kv_head.to(tl.int64) * stride_v_h

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
    if CAUSAL:
        stop = tl.maximum(last_position + 1, 0)
        full_stop = tl.maximum(first_position + 1, 0)
    first_key = start
    start = start // BLOCK_N * BLOCK_N
    full_stop = full_stop // BLOCK_N * BLOCK_N
    full_start = tl.minimum((full_start + BLOCK_N - 1) // BLOCK_N * BLOCK_N, tl.maximum(full_stop, start))
    full_stop = tl.maximum(full_stop, full_start)

    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)
    ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    slopes_M = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slopes_M = tl.load(alibi_slopes_ptr + heads_M, mask=valid_M, other=0.0) * 1.4426950408889634
    q_rows_ptr = q_ptr + query_start.to(tl.int64) * stride_q_t
    q_rows_M = tokens_M.to(tl.int64) * stride_q_t + heads_M * stride_q_h
    q_MD = in_type(load_rows(q_rows_ptr, q_rows_M, valid_M, KEY_SIZE, BLOCK_D, True), k_type, INTERPRETED)
    q_MP = q_MD
    if BLOCK_P:
        q_MP = load_rows(q_rows_ptr + BLOCK_D, q_rows_M, valid_M, KEY_SIZE - BLOCK_D, BLOCK_P, True)
        q_MP = in_type(q_MP, k_type, INTERPRETED)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks_ptr is not None:
        max_M = tl.load(sinks_ptr + heads_M, mask=valid_M, other=0.0).to(tl.float32) * 1.4426950408889634
        sum_M = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):
        if part != 0 or WINDOW or CHUNK:
            acc_MV, max_M, sum_M = _attend_keys(
                acc_MV,
                max_M,
                sum_M,
                q_MD,
                q_MP,
                k_ptr,
                v_ptr,
                table_ptr,
                start if part == 0 else full_start if part == 1 else full_stop,
                full_start if part == 0 else full_stop if part == 1 else stop,
                first_key,
                seq_len,
                positions_M,
                slopes_M,
                scale,
                soft_cap,
                stride_k_b,
                stride_k_n,
                stride_v_b,
                stride_v_n,
                KEY_SIZE,
                BLOCK_D,
                BLOCK_P,
                VALUE_SIZE,
                BLOCK_V,
                BLOCK_N,
                BLOCK_SIZE,
                CAUSAL,
                WINDOW,
                CHUNK,
                SOFT_CAP,
                ALIBI,
                part != 1,
                k_type,
                v_type,
                INTERPRETED,
            )

    # Nothing seen: the output is 0, and the log-sum-exp `max_M`, which is -inf.
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    factor_M = 1.0 / total_M
    if v_scale_ptr is not None:
        factor_M *= tl.load(v_scale_ptr)
    channels_V = tl.arange(0, BLOCK_V)
    out_M = (query_start + tokens_M).to(tl.int64) * stride_out_t + heads_M * stride_out_h
    tl.store(
        out_ptr + out_M[:, None] + channels_V[None, :],
        (acc_MV * factor_M[:, None]).to(out_ptr.dtype.element_ty),
        mask=valid_M[:, None] & (channels_V < VALUE_SIZE)[None, :],
    )
    if lse_ptr is not None:
        lse_M = (max_M + tl.log2(total_M)) / 1.4426950408889634
        lse_places_M = heads_M.to(tl.int64) * stride_lse_h + (query_start + tokens_M) * stride_lse_t
        tl.store(lse_ptr + lse_places_M, lse_M, mask=valid_M)
