"""Attention of a tile of queries over its request's keys on Hopper: a warp that loads, two warpgroups that multiply.

The loading warp brings tiles of keys and values with the bulk tensor copy engine into rings in shared memory. Each
warpgroup has 64 rows, and takes the softmax of a tile while the tensor cores multiply the weights of the one before.
Knows the same as `unified_kernel`. Legend as there; A and P the parts of the key channels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention.kernels.paged.hopper_parts import find_tile, keep_rows, load_keys, seen_by, softmax


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
def _attend(
    WARPGROUP: gl.constexpr,
    q_ptr,
    out_ptr,
    lse_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    buffers,
    query_start,
    query_len,
    seq_len,
    first_token,
    head,
    heads_left,
    first_key,
    stop_key,
    scale2,
    soft_cap2,
    strides,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PACK: gl.constexpr,
    KEY_SIZE: gl.constexpr,
    VALUE_SIZE: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    PAGED: gl.constexpr,
):
    """One warpgroup: its 64 of the tile's 128 rows."""
    tiles_QA, tiles_QP, tiles_A, tiles_P, tiles_V, full_k, empty_k, full_v, empty_v = buffers
    stride_q_t, stride_q_h, stride_out_t, stride_out_h, stride_lse_h, stride_lse_t = strides
    BLOCK_A: gl.constexpr = sizes[0]
    BLOCK_P: gl.constexpr = sizes[1]
    BLOCK_V: gl.constexpr = sizes[2]
    BLOCK_N: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    LIMITED: gl.constexpr = mask[1] != 0 or mask[2] != 0
    ALIBI: gl.constexpr = alibi_slopes_ptr is not None
    ROWS: gl.constexpr = tiles_QA.shape[1]
    FIRST: gl.constexpr = WARPGROUP * ROWS
    USED: gl.constexpr = 2 * ROWS // PACK * PACK
    dtype: gl.constexpr = tiles_A.dtype
    mma_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_V, 2)
    per_row: gl.constexpr = gl.SliceLayout(1, mma_N)
    per_row_V: gl.constexpr = gl.SliceLayout(1, mma_V)
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    rows_C = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copies))
    tokens_C = first_token + rows_C // PACK
    valid_C = (tokens_C < query_len) & (rows_C < USED) & (rows_C % PACK < heads_left)
    q_rows_C = (query_start + tokens_C).to(gl.int64) * stride_q_t + (head + rows_C % PACK) * stride_q_h
    q_A = tiles_QA.index(WARPGROUP)
    q_P = tiles_QP.index(WARPGROUP)
    _load_queries(q_ptr + q_rows_C, q_A, q_P, valid_C, copies, KEY_SIZE, BLOCK_P)

    rows_M = FIRST + gl.arange(0, ROWS, layout=per_row)
    tokens_M = first_token + rows_M // PACK
    positions_M = seq_len - query_len + tokens_M
    heads_M = head + rows_M % PACK
    valid_M = (tokens_M < query_len) & (rows_M < USED) & (rows_M % PACK < heads_left)
    slopes_M = gl.zeros([ROWS], gl.float32, layout=per_row)
    if ALIBI:
        slopes_M = gl.load(alibi_slopes_ptr + heads_M, mask=valid_M, other=0.0) * 1.4426950408889634
    if sinks_ptr is not None:
        max_M = gl.load(sinks_ptr + heads_M, mask=valid_M, other=0.0).to(gl.float32) * 1.4426950408889634
        sum_M = gl.full([ROWS], 1.0, gl.float32, layout=per_row)
    else:
        max_M = gl.full([ROWS], -float("inf"), gl.float32, layout=per_row)
        sum_M = gl.zeros([ROWS], gl.float32, layout=per_row)
    acc_MV = gl.zeros([ROWS, BLOCK_V], gl.float32, layout=mma_V)

    start, stop = first_key // BLOCK_N, gl.cdiv(stop_key, BLOCK_N)
    if start < stop:
        first_position = seq_len - query_len + first_token + FIRST // PACK
        last_position = seq_len - query_len + gl.minimum(first_token + (FIRST + ROWS - 1) // PACK, query_len - 1)
        _, _, full_start, full_stop = seen_by(first_position, last_position, seq_len, BLOCK_N, mask)
        full_stop = gl.minimum(full_stop, stop - 1)
        full_start = gl.maximum(gl.minimum(full_start, full_stop), start)

        mbarrier.wait(full_k.index(0), 0)
        scores = _multiply_keys(q_A, q_P, tiles_A.index(0), tiles_P.index(0), BLOCK_P, mma_N)
        scores_MN = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty_k.index(0), count=1)
        weights_MN, max_M, sum_M, rescale_M = softmax(
            scores_MN,
            max_M,
            sum_M,
            (stop - 1) * BLOCK_N,
            seq_len,
            positions_M,
            slopes_M,
            scale2,
            soft_cap2,
            mask,
            SOFT_CAP,
            ALIBI,
            True,
        )
        weights = gl.convert_layout(weights_MN.to(dtype), operand)
        if seq_len < stop * BLOCK_N:
            mbarrier.wait(full_v.index(0), 0)
            keep_rows(tiles_V.index(0), 0, seq_len - (stop - 1) * BLOCK_N, BLOCK_N, BLOCK_V)

        # The tiles from the last to the first: those of the diagonal, those that all see, those that windows cut.
        count = 0
        for part in gl.static_range(3):
            if part != 2 or LIMITED:
                part_start = full_stop if part == 0 else full_start if part == 1 else start
                part_stop = stop - 1 if part == 0 else full_stop if part == 1 else full_start
                for _ in range(part_start, part_stop):
                    last_stage, last_phase = count % STAGES, (count // STAGES) & 1
                    count += 1
                    stage, phase = count % STAGES, (count // STAGES) & 1
                    mbarrier.wait(full_k.index(stage), phase)
                    scores = _multiply_keys(q_A, q_P, tiles_A.index(stage), tiles_P.index(stage), BLOCK_P, mma_N)
                    mbarrier.wait(full_v.index(last_stage), last_phase)
                    acc = warpgroup_mma(weights, tiles_V.index(last_stage), acc_MV, is_async=True)
                    scores_MN = warpgroup_mma_wait(1, deps=(scores,))
                    mbarrier.arrive(empty_k.index(stage), count=1)
                    weights_MN, max_M, sum_M, rescale_M = softmax(
                        scores_MN,
                        max_M,
                        sum_M,
                        (stop - 1 - count) * BLOCK_N,
                        seq_len,
                        positions_M,
                        slopes_M,
                        scale2,
                        soft_cap2,
                        mask,
                        SOFT_CAP,
                        ALIBI,
                        part != 1,
                    )
                    acc_MV = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(empty_v.index(last_stage), count=1)
                    acc_MV *= gl.convert_layout(rescale_M, per_row_V)[:, None]
                    weights = gl.convert_layout(weights_MN.to(dtype), operand)
        last_stage, last_phase = count % STAGES, (count // STAGES) & 1
        mbarrier.wait(full_v.index(last_stage), last_phase)
        if PAGED and LIMITED and start * BLOCK_N < first_key:
            keep_rows(tiles_V.index(last_stage), first_key - start * BLOCK_N, BLOCK_N, BLOCK_N, BLOCK_V)
        acc = warpgroup_mma(weights, tiles_V.index(last_stage), acc_MV, is_async=True)
        acc_MV = warpgroup_mma_wait(0, deps=(acc,))

    # Nothing seen: the output is 0, and the log-sum-exp `max_M`, which is -inf.
    total_M = gl.where(sum_M == 0.0, 1.0, sum_M)
    acc_MV *= gl.convert_layout(1.0 / total_M, per_row_V)[:, None]
    out_ptr += query_start.to(gl.int64) * stride_out_t + head * stride_out_h
    if BLOCK_V == BLOCK_A:
        # Through the memory of the queries, for stores of 16 bytes.
        q_A.store(acc_MV.to(dtype))
        out_rows_C = tokens_C.to(gl.int64) * stride_out_t + rows_C % PACK * stride_out_h
        _store(out_ptr, out_rows_C, q_A.load(copies), valid_C, VALUE_SIZE)
    else:
        out_rows_M = tokens_M.to(gl.int64) * stride_out_t + rows_M % PACK * stride_out_h
        out_rows_V = gl.convert_layout(out_rows_M, per_row_V)
        _store(out_ptr, out_rows_V, acc_MV, gl.convert_layout(valid_M, per_row_V), VALUE_SIZE)
    if lse_ptr is not None:
        lse_M = (max_M + gl.log2(total_M)) / 1.4426950408889634
        lse_rows_M = heads_M.to(gl.int64) * stride_lse_h + (query_start + tokens_M) * stride_lse_t
        gl.store(lse_ptr + lse_rows_M, lse_M, mask=valid_M)


@gluon.jit(
    do_not_specialize=[
        "num_reqs", "num_tiles", "num_packs", "section", "block_size", "k_row_b", "k_row_h", "k_col_h", "v_row_b",
        "v_row_h", "v_col_h", "stride_table_r", "stride_lse_h", "stride_lse_t",
    ],
    # Behind a batch's decodes they begin anywhere.
    do_not_specialize_on_alignment=["query_start_ptr", "key_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)  # fmt: skip
def attend_tile(
    k_A,
    k_P,
    v_V,
    q_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    key_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    scale2,
    soft_cap2,
    num_reqs,
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
    stride_table_r,
    stride_q_t,
    stride_q_h,
    stride_out_t,
    stride_out_h,
    stride_lse_h,
    stride_lse_t,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    KEY_SIZE: gl.constexpr,
    VALUE_SIZE: gl.constexpr,
    BLOCK_A: gl.constexpr,
    BLOCK_P: gl.constexpr,
    BLOCK_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFT_CAP: gl.constexpr,
):
    ROWS: gl.constexpr = 64
    TOKENS: gl.constexpr = 2 * ROWS // PACK
    PACKS: gl.constexpr = (GROUP + PACK - 1) // PACK
    sizes: gl.constexpr = (BLOCK_A, BLOCK_P, BLOCK_V, BLOCK_N, STAGES)
    mask: gl.constexpr = (CAUSAL, WINDOW, CHUNK)
    pack, request, query_start, query_len, first_token = find_tile(
        query_start_ptr, num_reqs, num_tiles, num_packs, section, TOKENS
    )
    if (first_token < 0) | (first_token >= query_len):
        return
    PAGED: gl.constexpr = block_table_ptr is not None
    table_ptr = query_start_ptr
    if not PAGED:
        key_start = gl.load(key_start_ptr + request)
        seq_len = gl.load(key_start_ptr + request + 1) - key_start
    else:
        key_start = 0
        seq_len = gl.load(seq_lens_ptr + request)
        table_ptr = block_table_ptr + request.to(gl.int64) * stride_table_r
    first_position = seq_len - query_len + first_token
    last_position = gl.minimum(first_position + TOKENS, seq_len) - 1
    first_key, stop_key, _, _ = seen_by(first_position, last_position, seq_len, BLOCK_N, mask)
    kv_head = pack // PACKS
    head = kv_head * GROUP + pack % PACKS * PACK
    heads_left = GROUP - pack % PACKS * PACK

    dtype: gl.constexpr = k_A.dtype
    layout_A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_A], dtype)
    layout_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_V], dtype)
    tiles_QA = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_A], layout_A)
    tiles_A = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_A], layout_A)
    tiles_QP, tiles_P = tiles_QA, tiles_A
    if BLOCK_P:
        layout_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_P], dtype)
        tiles_QP = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_P], layout_P)
        tiles_P = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_P], layout_P)
    tiles_V = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_V], layout_V)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=2)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_v.index(stage), count=2)

    buffers = (tiles_QA, tiles_QP, tiles_A, tiles_P, tiles_V, full_k, empty_k, full_v, empty_v)
    strides = (stride_q_t, stride_q_h, stride_out_t, stride_out_h, stride_lse_h, stride_lse_t)
    first_block, last_block = first_key // block_size, (seq_len - 1) // block_size
    keys = (key_start, table_ptr, first_block, last_block, block_size)
    k_places, v_places = (k_row_b, k_row_h, k_col_h), (v_row_b, v_row_h, v_col_h)
    gl.warp_specialize(
        [
            (_attend, (
                0, q_ptr, out_ptr, lse_ptr, alibi_slopes_ptr, sinks_ptr, buffers, query_start, query_len, seq_len,
                first_token, head, heads_left, first_key, stop_key, scale2, soft_cap2, strides, sizes, mask, PACK,
                KEY_SIZE, VALUE_SIZE, SOFT_CAP, PAGED,
            )),
            (_attend, (
                1, q_ptr, out_ptr, lse_ptr, alibi_slopes_ptr, sinks_ptr, buffers, query_start, query_len, seq_len,
                first_token, head, heads_left, first_key, stop_key, scale2, soft_cap2, strides, sizes, mask, PACK,
                KEY_SIZE, VALUE_SIZE, SOFT_CAP, PAGED,
            )),
            (load_keys, (
                k_A, k_P, v_V, buffers, kv_head, first_key, stop_key, keys, k_places, v_places, sizes, PIECE, PAGED,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
