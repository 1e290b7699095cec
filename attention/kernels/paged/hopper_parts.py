"""The parts of `unified_hopper_kernel` that multiply nothing: which tile, which keys, the loading warp, the softmax.

Legend as in `unified_kernel`; A and P the parts of the key channels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def find_tile(query_start_ptr, num_reqs, num_tiles, num_packs, section, TOKENS: gl.constexpr):
    """The program's query heads, request and first token; ordered and found as in `unified_kernel`."""
    BLOCK_R: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
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
    CAUSAL: gl.constexpr = mask[0]
    WINDOW: gl.constexpr = mask[1]
    CHUNK: gl.constexpr = mask[2]
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
    return first, stop, gl.cdiv(full_first, BLOCK_N), full_stop // BLOCK_N


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
    BLOCK_N: gl.constexpr,
    PIECE: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Starts the copies of a tile, `PIECE` keys of a block at a time."""
    key_start, table_ptr, first_block, last_block, block_size = keys
    row_b, row_h, col_h = places
    mbarrier.expect(full, BLOCK_N * (BLOCK_A + BLOCK_P) * 2)
    for piece in gl.static_range(BLOCK_N // PIECE):
        row = key + piece * PIECE
        if not PAGED:
            row += key_start
        else:
            # Only blocks that hold seen keys are looked up; any will do for what is masked.
            block = gl.load(table_ptr + gl.maximum(gl.minimum(row // block_size, last_block), first_block))
            row = block * row_b + row % block_size
        row += kv_head * row_h
        target = tile_A.slice(piece * PIECE, PIECE, dim=0)
        tma.async_copy_global_to_shared(rows_A, [row, kv_head * col_h], full, target)
        if BLOCK_P:
            target_P = tile_P.slice(piece * PIECE, PIECE, dim=0)
            tma.async_copy_global_to_shared(rows_P, [row, kv_head * col_h + BLOCK_A], full, target_P)


@gluon.jit
def load_keys(
    k_A,
    k_P,
    v_V,
    buffers,
    kv_head,
    first_key,
    stop_key,
    keys,
    k_places,
    v_places,
    sizes: gl.constexpr,
    PIECE: gl.constexpr,
    PAGED: gl.constexpr,
):
    """The loading warp: all tiles, the last keys first."""
    _, _, tiles_A, tiles_P, tiles_V, full_k, empty_k, full_v, empty_v = buffers
    BLOCK_A: gl.constexpr = sizes[0]
    BLOCK_P: gl.constexpr = sizes[1]
    BLOCK_V: gl.constexpr = sizes[2]
    BLOCK_N: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    stop = gl.cdiv(stop_key, BLOCK_N)
    for count in range(0, stop - first_key // BLOCK_N):
        key = (stop - 1 - count) * BLOCK_N
        stage = count % STAGES
        phase = ((count // STAGES) & 1) ^ 1
        mbarrier.wait(empty_k.index(stage), phase)
        tile_A, tile_P, full = tiles_A.index(stage), tiles_P.index(stage), full_k.index(stage)
        _load_tile(
            k_A, k_P, tile_A, tile_P, full, key, kv_head, keys, k_places, BLOCK_A, BLOCK_P, BLOCK_N, PIECE, PAGED
        )
        mbarrier.wait(empty_v.index(stage), phase)
        tile_V, full = tiles_V.index(stage), full_v.index(stage)
        _load_tile(v_V, v_V, tile_V, tile_V, full, key, kv_head, keys, v_places, BLOCK_V, 0, BLOCK_N, PIECE, PAGED)


@gluon.jit
def keep_rows(tile, first, stop, BLOCK_N: gl.constexpr, CHANNELS: gl.constexpr):
    """Clears the values that nobody sees and that may be NaN: a weight of 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    for start in gl.static_range(0, CHANNELS, 64):
        part = tile.slice(start, 64, dim=1)
        part.store(gl.where(((rows >= first) & (rows < stop))[:, None], part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def softmax(
    scores_MN,
    max_M,
    sum_M,
    first_key,
    seq_len,
    positions_M,
    slopes_M,
    scale2,
    soft_cap2,
    mask: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    ALIBI: gl.constexpr,
    MASKED: gl.constexpr,
):
    """A tile's weights, and what the rows' maximum, sum and earlier results become; all in powers of 2."""
    CAUSAL: gl.constexpr = mask[0]
    WINDOW: gl.constexpr = mask[1]
    CHUNK: gl.constexpr = mask[2]
    keys_N = first_key + gl.arange(0, scores_MN.shape[1], layout=gl.SliceLayout(0, scores_MN.type.layout))
    if SOFT_CAP:  # a hyperbolic tangent; `scale2` has the factor 2 of its exponent
        scores_MN = soft_cap2 * (1.0 - 2.0 / (gl.exp2(scores_MN * scale2) + 1.0))
    elif ALIBI:
        scores_MN *= scale2
    if ALIBI:
        scores_MN += slopes_M[:, None] * (keys_N[None, :] - positions_M[:, None]).to(gl.float32)
    if MASKED:
        seen_MN = (keys_N < seq_len)[None, :]
        if CAUSAL:
            seen_MN = seen_MN & (keys_N[None, :] <= positions_M[:, None])
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
        # A query that has seen nothing yet: -inf minus -inf would be NaN.
        base_M = gl.where(new_max_M == -float("inf"), 0.0, new_max_M)
    if SOFT_CAP or ALIBI:
        weights_MN = gl.exp2(scores_MN - base_M[:, None])
    else:
        weights_MN = gl.exp2(scores_MN * scale2 - base_M[:, None])
    rescale_M = gl.exp2(max_M - base_M)
    return weights_MN, new_max_M, sum_M * rescale_M + gl.sum(weights_MN, 1), rescale_M
