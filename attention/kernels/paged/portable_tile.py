"""One program of the portable kernel: it finds its tile of queries and the keys that they see, and attends.

Legend as in `attention.kernels.paged.portable`.
"""

import triton
import triton.language as tl

from attention.kernels.paged.call import AttentionTiles, LogSumExps, Requests
from attention.kernels.paged.portable_keys import KeyRows, PortableRequestKeys, Queries, attend_keys, in_type, load_rows
from attention.kernels.paged.split import WRITTEN, find_share


@triton.jit(
    do_not_specialize=[
        "lse_stride_h",
        "lse_stride_t",
        "num_reqs",
        "table_stride",
        "num_tiles",
        "num_packs",
        "section",
        "num_tokens",
    ],
    # In a batch with decodes, which come first, these pointers may have any alignment, and a table is as wide as its
    # longest request.
    do_not_specialize_on_alignment=["query_start_ptr", "key_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def attend_tile(
    q,
    k,
    v,
    out,
    partials,
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
    num_tokens,
    sizes: tl.constexpr,
    mask: tl.constexpr,
    types: tl.constexpr,
):
    """Attends for one tile. With a block table, keys are in the cache's blocks; else `key_start_ptr` holds their
    starts.

    If there is memory for partial results, the second axis of the grid divides the tile's keys.

    Tiles go through few kv heads at a time, so that their keys stay in the L2 cache, and start with a request's last
    queries, which see the most keys.
    """
    lse = LogSumExps(lse_ptr, lse_stride_h, lse_stride_t)
    requests = Requests(num_reqs, query_start_ptr, key_start_ptr, seq_lens_ptr, block_table_ptr, table_stride)
    tiles = AttentionTiles(num_tiles, num_packs, section)
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

    # Some query of the tile sees keys [start, stop); all queries see keys [full_start, full_stop).
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
    SPLIT: tl.constexpr = partials.out_ptr is not None
    if SPLIT:
        split = tl.program_id(1)
        share = find_share(stop - start, tl.num_programs(1), BLOCK_N, sizes.least_keys)
        alone = stop - start <= share
        if alone & (split > 0):
            return
        split_start = start + split * share
        split_stop = split_start + share
        start = split_start
        stop = tl.maximum(tl.minimum(stop, split_stop), split_start)
        full_start = tl.minimum(tl.maximum(full_start, split_start), split_stop)
        full_stop = tl.minimum(tl.maximum(full_stop, split_start), split_stop)

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
    q_MD = in_type(load_rows(q_rows_ptr, q_rows_M, valid_M, KEY_SIZE, BLOCK_D, True), types.k, types.interpreted)
    q_MP = q_MD
    if BLOCK_P:
        q_MP = load_rows(q_rows_ptr + BLOCK_D, q_rows_M, valid_M, KEY_SIZE - BLOCK_D, BLOCK_P, True)
        q_MP = in_type(q_MP, types.k, types.interpreted)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if scoring.sinks_ptr is not None:
        max_M = tl.load(scoring.sinks_ptr + heads_M, mask=valid_M, other=0.0).to(tl.float32) * 1.4426950408889634
        sum_M = tl.full([BLOCK_M], 1.0, tl.float32)
        if SPLIT:  # the first split has the sinks
            max_M = tl.where(split == 0, max_M, float("-inf"))
            sum_M = tl.where(split == 0, sum_M, 0.0)
    else:
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
    queries = Queries(q_MD, q_MP, positions_M, slopes_M)
    k_rows = KeyRows(k_ptr, k.stride_b, k.stride_n, k.stride_h)
    v_rows = KeyRows(v_ptr, v.stride_b, v.stride_n, v.stride_h)
    keys = PortableRequestKeys(k_rows, v_rows, table_ptr, first_key, seq_len)
    for part in tl.static_range(3):
        if part != 0 or WINDOW or CHUNK:
            acc_MV, max_M, sum_M = attend_keys(
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
    out_MV = acc_MV * factor_M[:, None]
    lse_M = (max_M + tl.log2(total_M)) / 1.4426950408889634
    in_value_V = (channels_V < sizes.value_size)[None, :]
    if SPLIT:
        num_heads = tiles.num_packs // PACKS * GROUP
        partial_M = valid_M & (not alone)
        places_M = ((split.to(tl.int64) * num_tokens + query_start + tokens_M) * num_heads + heads_M) * sizes.value_size
        mask_MV = partial_M[:, None] & in_value_V
        tl.store(partials.out_ptr + places_M[:, None] + channels_V[None, :], out_MV, mask=mask_MV)
        lse_places_M = (split * num_heads + heads_M) * num_tokens + query_start + tokens_M
        tl.store(partials.lse_ptr + lse_places_M, tl.where(alone, WRITTEN, lse_M), mask=valid_M)
        valid_M = valid_M & alone
    out_M = (query_start + tokens_M).to(tl.int64) * out.stride_t + heads_M * out.stride_h
    mask_MV = valid_M[:, None] & in_value_V
    tl.store(out.ptr + out_M[:, None] + channels_V[None, :], out_MV.to(out.ptr.dtype.element_ty), mask=mask_MV)
    if lse.ptr is not None:
        lse_places_M = heads_M.to(tl.int64) * lse.stride_h + (query_start + tokens_M) * lse.stride_t
        tl.store(lse.ptr + lse_places_M, lse_M, mask=valid_M)


@triton.jit
def _find_tile(requests, tile, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Returns (request, start of its queries, their number, the tile's first token among them).

    Every request has one tile more than it fills, so that a tile's request follows from the query starts alone. A tile
    may therefore begin past its request's last token. It may also begin below 0, before the first request, because the
    query starts need not begin with 0.
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
