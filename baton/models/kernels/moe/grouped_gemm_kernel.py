"""The products of rows with the weights of their experts, as Triton kernels, for `grouped_gemm`.

Weights are a product's rows and tokens its columns. The tensor cores' rows come in 64s and their columns in 8s, so an
expert with few tokens costs hardly more than reading its weights. Shared experts, which have all tokens, need neither
order nor routing: their programs come first and load weights into L2 while the routing still runs. Legend: M row of a
tile (one assignment each, or a token), N output channel, K input channel, Q numbers of gate and up.
"""

import triton
import triton.language as tl

from baton.models.kernels.moe.expert_operands import add_product, bias_of, inputs, prefetch_rows, weight_tile
from baton.models.kernels.moe.expert_tiles import assignments, places, shared_tile, store, tile_and_block
from baton.tritonlib.launch import await_predecessors, start_dependents


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def grouped_gate_up(
    x,
    weights,
    weights_map,
    bias,
    scales,
    row_weights,
    shared,
    shared_map,
    shared_gates,
    order,
    tiles,
    out,
    num_tokens,
    num_tiles,
    x_stride,
    weights_stride_E,
    weights_stride_N,
    weights_stride_K,
    limit,
    alpha,
    CHOICES: tl.constexpr,
    SHARED: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    TANH_GELU: tl.constexpr,
    SQUARED_RELU: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes out[place] = gated activation of an expert's gate and up; rows of x are found through the order. The
    rows of the SHARED experts follow, each over all tokens: `shared` has their gates before their ups, and
    `shared_gates` each token's factor. With SQUARED_RELU there is no gate, and no scale or bias."""
    start_dependents(OVERLAP)
    blocks: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    shared_programs = SHARED * blocks * tl.cdiv(num_tokens, BLOCK_M)
    if SHARED and tl.program_id(0) < shared_programs:
        expert, block, tokens_M, exists_M = shared_tile(num_tokens, blocks, BLOCK_M)
        first = expert * OUT + block * BLOCK_N
        if OVERLAP and PREFETCHED and shared_map is not None:
            rows_Q = tl.arange(0, 2 * BLOCK_N)
            rows_Q = tl.minimum(first + rows_Q % BLOCK_N, SHARED * OUT - 1) + rows_Q // BLOCK_N * (SHARED * OUT)
            prefetch_rows(shared + rows_Q.to(tl.int64) * IN, IN, PREFETCHED)
        await_predecessors(OVERLAP)
        gate_NM, up_NM = _gate_and_up(
            x + tokens_M.to(tl.int64) * x_stride, exists_M, shared, shared_map, 0, first, IN, 1, None, None,
            SHARED * OUT, IN, IN, 1, False, BLOCK_M, BLOCK_N, BLOCK_K, INTERPRETED,
        )  # fmt: skip
        gated_NM = _activate(gate_NM, up_NM, limit, alpha, CLAMPED, TANH_GELU)
        if shared_gates is not None:
            gated_NM *= tl.load(shared_gates + tokens_M, mask=exists_M, other=0.0)[None, :]
        rows_M = num_tokens * (CHOICES + expert) + tokens_M
        store(out, gated_NM, rows_M, block * BLOCK_N + tl.arange(0, BLOCK_N), exists_M, OUT)
        return
    await_predecessors(OVERLAP)
    tile, block = tile_and_block(tl.program_id(0) - shared_programs, num_tiles, blocks)
    expert, places_M, exists_M = places(tiles, tile, num_tiles, order is None, BLOCK_M)
    if expert < 0:
        return
    assignments_M = assignments(order, places_M, exists_M)
    x_ptrs_M = x + (assignments_M // CHOICES).to(tl.int64) * x_stride
    weights_expert = weights + expert.to(tl.int64) * weights_stride_E
    first = block * BLOCK_N
    channels_N = first + tl.arange(0, BLOCK_N)
    if SQUARED_RELU:
        only_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, IN, BLOCK_K):
            x_KM = inputs(x_ptrs_M, exists_M, start, IN, BLOCK_K)
            only_NK = weight_tile(
                weights_expert, weights_map, expert, first, start, weights_stride_N, weights_stride_K,
                OUT, IN, INPUTS_FIRST, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            only_NM = add_product(only_NM, only_NK, x_KM, None, start, SCALE_K, 1, INTERPRETED)
        only_NM = tl.maximum(only_NM, 0.0)
        store(out, only_NM * only_NM, places_M, channels_N, exists_M, OUT)
        return
    if INTERLEAVED:
        both_QM = tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, IN, BLOCK_K):
            x_KM = inputs(x_ptrs_M, exists_M, start, IN, BLOCK_K)
            both_NK = weight_tile(
                weights_expert, weights_map, expert, 2 * first, start, weights_stride_N, weights_stride_K,
                2 * OUT, IN, INPUTS_FIRST, 2 * BLOCK_N, BLOCK_K,
            )  # fmt: skip
            both_QM = add_product(both_QM, both_NK, x_KM, None, start, SCALE_K, 1, INTERPRETED)
        if bias is not None:
            both_QM += bias_of(bias + expert * 2 * OUT, 2 * first + tl.arange(0, 2 * BLOCK_N), 2 * OUT)
        gate_NM, up_NM = tl.split(tl.permute(tl.reshape(both_QM, [BLOCK_N, 2, BLOCK_M]), [0, 2, 1]))
    else:
        SCALE_ROWS: tl.constexpr = 2 * ((OUT + SCALE_N - 1) // SCALE_N)
        SCALE_COLUMNS: tl.constexpr = (IN + SCALE_K - 1) // SCALE_K
        if scales is not None:
            gate_scales = scales + (expert * SCALE_ROWS + first // SCALE_N) * SCALE_COLUMNS
            up_scales = gate_scales + SCALE_ROWS // 2 * SCALE_COLUMNS
        else:
            gate_scales = None
            up_scales = None
        gate_NM, up_NM = _gate_and_up(
            x_ptrs_M, exists_M, weights_expert, weights_map, expert, first, weights_stride_N, weights_stride_K,
            gate_scales, up_scales, OUT, IN, SCALE_K, SCALE_COLUMNS, INPUTS_FIRST, BLOCK_M, BLOCK_N, BLOCK_K,
            INTERPRETED,
        )  # fmt: skip
        if bias is not None:
            gate_NM += bias_of(bias + expert * 2 * OUT, channels_N, OUT)
            up_NM += bias_of(bias + expert * 2 * OUT + OUT, channels_N, OUT)
    if row_weights is not None:
        weights_M = tl.load(row_weights + assignments_M, mask=exists_M, other=0.0)
        gate_NM *= weights_M[None, :]
        up_NM *= weights_M[None, :]
    store(out, _activate(gate_NM, up_NM, limit, alpha, CLAMPED, TANH_GELU), places_M, channels_N, exists_M, OUT)


@triton.jit
def _gate_and_up(
    x_ptrs_M,
    exists_M,
    weights,
    weights_map,
    expert,
    first,
    stride_N,
    stride_K,
    gate_scales,
    up_scales,
    HALF: tl.constexpr,
    IN: tl.constexpr,
    SCALE_K: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Multiplies by a block of an expert's rows from `first` on (gate), and by the rows HALF later (up)."""
    gate_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, IN, BLOCK_K):
        x_KM = inputs(x_ptrs_M, exists_M, start, IN, BLOCK_K)
        gate_NK = weight_tile(
            weights, weights_map, expert, first, start, stride_N, stride_K, 2 * HALF, IN, INPUTS_FIRST, BLOCK_N, BLOCK_K
        )
        up_NK = weight_tile(
            weights, weights_map, expert, HALF + first, start, stride_N, stride_K, 2 * HALF, IN, INPUTS_FIRST,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gate_NM = add_product(gate_NM, gate_NK, x_KM, gate_scales, start, SCALE_K, SCALE_COLUMNS, INTERPRETED)
        up_NM = add_product(up_NM, up_NK, x_KM, up_scales, start, SCALE_K, SCALE_COLUMNS, INTERPRETED)
    if gate_scales is not None and SCALE_COLUMNS == 1:
        gate_NM *= tl.load(gate_scales)
        up_NM *= tl.load(up_scales)
    return gate_NM, up_NM


@triton.jit
def _activate(gate_NM, up_NM, limit, alpha, CLAMPED: tl.constexpr, TANH_GELU: tl.constexpr):
    if CLAMPED:
        gate_NM = tl.minimum(gate_NM, limit)
        up_NM = tl.minimum(tl.maximum(up_NM, -limit), limit) + 1.0
        gate_NM /= 1.0 + tl.exp(-alpha * gate_NM)
    elif TANH_GELU:  # as in `baton.models.kernels.activation`
        gate_NM /= 1.0 + tl.exp(-1.5957691216057308 * (gate_NM + 0.044715 * gate_NM * gate_NM * gate_NM))
    else:
        gate_NM /= 1.0 + tl.exp(-gate_NM)
    return gate_NM * up_NM


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def grouped_down(
    x,
    x_map,
    weights,
    weights_map,
    bias,
    scales,
    row_weights,
    shared,
    shared_map,
    order,
    tiles,
    out,
    num_tokens,
    num_tiles,
    weights_stride_E,
    weights_stride_N,
    weights_stride_K,
    CHOICES: tl.constexpr,
    SHARED: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes out[assignment] = an expert's product with x[place], times the assignment's weight. The rows of SHARED
    experts follow; `shared` has those experts in its columns, one after the other. With `x_map`, a descriptor of x in
    blocks of BLOCK_M rows, the rows of a tile are read by it."""
    start_dependents(OVERLAP)
    blocks: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    shared_programs = SHARED * blocks * tl.cdiv(num_tokens, BLOCK_M)
    if SHARED and tl.program_id(0) < shared_programs:
        expert, block, tokens_M, exists_M = shared_tile(num_tokens, blocks, BLOCK_M)
        channels_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if OVERLAP and PREFETCHED and shared_map is not None:
            row_ptrs_N = shared + tl.minimum(channels_N, OUT - 1).to(tl.int64) * (SHARED * IN) + expert * IN
            prefetch_rows(row_ptrs_N, IN, PREFETCHED)
        await_predecessors(OVERLAP)
        rows_M = num_tokens * (CHOICES + expert) + tokens_M
        down_NM = _down(
            x + rows_M.to(tl.int64) * IN, exists_M, None, 0, shared + expert * IN, shared_map, expert,
            block * BLOCK_N, SHARED * IN, 1, None, OUT, IN, IN, 1, False, BLOCK_M, BLOCK_N, BLOCK_K, INTERPRETED,
        )  # fmt: skip
        store(out, down_NM, rows_M, channels_N, exists_M, OUT)
        return
    await_predecessors(OVERLAP)
    tile, block = tile_and_block(tl.program_id(0) - shared_programs, num_tiles, blocks)
    expert, places_M, exists_M = places(tiles, tile, num_tiles, order is None, BLOCK_M)
    if expert < 0:
        return
    first = block * BLOCK_N
    channels_N = first + tl.arange(0, BLOCK_N)
    SCALE_ROWS: tl.constexpr = (OUT + SCALE_N - 1) // SCALE_N
    SCALE_COLUMNS: tl.constexpr = (IN + SCALE_K - 1) // SCALE_K
    if scales is not None:
        down_scales = scales + (expert * SCALE_ROWS + first // SCALE_N) * SCALE_COLUMNS
    else:
        down_scales = None
    first_place = tile if order is None else tl.load(tiles + num_tiles + tile)
    down_NM = _down(
        x + places_M.to(tl.int64) * IN, exists_M, x_map, first_place, weights + expert.to(tl.int64) * weights_stride_E,
        weights_map, expert, first, weights_stride_N, weights_stride_K, down_scales, OUT, IN, SCALE_K, SCALE_COLUMNS,
        INPUTS_FIRST, BLOCK_M, BLOCK_N, BLOCK_K, INTERPRETED,
    )  # fmt: skip
    if bias is not None:
        down_NM += bias_of(bias + expert * OUT, channels_N, OUT)
    assignments_M = assignments(order, places_M, exists_M)
    if row_weights is not None:
        down_NM *= tl.load(row_weights + assignments_M, mask=exists_M, other=0.0)[None, :]
    store(out, down_NM, assignments_M, channels_N, exists_M, OUT)


@triton.jit
def _down(
    x_ptrs_M,
    exists_M,
    x_map,
    first_place,
    weights,
    weights_map,
    expert,
    first,
    stride_N,
    stride_K,
    scales,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_K: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Multiplies by a block of an expert's rows."""
    down_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, IN, BLOCK_K):
        if x_map is None:
            x_KM = inputs(x_ptrs_M, exists_M, start, IN, BLOCK_K)
        else:  # past the expert's places come the next expert's, whose products are not stored
            x_KM = tl.trans(x_map.load([first_place, start]))
        down_NK = weight_tile(
            weights, weights_map, expert, first, start, stride_N, stride_K, OUT, IN, INPUTS_FIRST, BLOCK_N, BLOCK_K
        )
        down_NM = add_product(down_NM, down_NK, x_KM, scales, start, SCALE_K, SCALE_COLUMNS, INTERPRETED)
    if scales is not None and SCALE_COLUMNS == 1:
        down_NM *= tl.load(scales)
    return down_NM
