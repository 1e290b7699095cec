"""The products of rows with the weights of their experts, as a Triton kernel; `grouped_gemm` says what they are for.

Weights stand in the rows of a product and tokens in its columns: the tensor cores' rows come in 64s, their columns in
8s, so that an expert with few tokens costs hardly more than reading it. Legend: M place of a tile (one assignment
each), N output channel, K input channel, I channel after the gate, Q numbers of gate and up.
"""

import triton
import triton.language as tl

# Tiles that share weights or inputs run at about the same time, so that L2 has these.
GROUP_TILES = tl.constexpr(8)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_gate_up(
    x,
    weights,
    weights_map,
    bias,
    scales,
    row_weights,
    order,
    tiles,
    out,
    num_tiles,
    x_stride,
    weights_stride_E,
    weights_stride_N,
    weights_stride_K,
    limit,
    alpha,
    CHOICES: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[place] = gated activation of an expert's gate and up; rows of x are found through the order."""
    blocks: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    tile, block = _tile_and_block(num_tiles, blocks)
    expert, places_M, exists_M = _places(tiles, tile, num_tiles, order is None, BLOCK_M)
    if expert < 0:
        return
    assignments_M = _assignments(order, places_M, exists_M)
    x_ptrs_M = x + (assignments_M // CHOICES).to(tl.int64) * x_stride
    weights_expert = weights + expert.to(tl.int64) * weights_stride_E
    first = block * BLOCK_N
    channels_N = first + tl.arange(0, BLOCK_N)
    SCALE_ROWS: tl.constexpr = 2 * ((OUT + SCALE_N - 1) // SCALE_N)
    SCALE_COLUMNS: tl.constexpr = (IN + SCALE_K - 1) // SCALE_K
    if scales is not None:
        gate_scales = scales + (expert * SCALE_ROWS + first // SCALE_N) * SCALE_COLUMNS
        up_scales = gate_scales + SCALE_ROWS // 2 * SCALE_COLUMNS
    else:
        gate_scales = None
        up_scales = None
    if INTERLEAVED:
        both_QM = tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, IN, BLOCK_K):
            x_KM = _inputs(x_ptrs_M, exists_M, start, IN, BLOCK_K)
            both_NK = _weights(
                weights_expert,
                weights_map,
                expert,
                2 * first,
                start,
                weights_stride_N,
                weights_stride_K,
                2 * OUT,
                IN,
                INPUTS_FIRST,
                2 * BLOCK_N,
                BLOCK_K,
            )
            both_QM = _add_product(both_QM, both_NK, x_KM, None, start, SCALE_K, SCALE_COLUMNS, INTERPRETED)
        if bias is not None:
            channels_Q = 2 * first + tl.arange(0, 2 * BLOCK_N)
            both_QM += tl.load(bias + expert * 2 * OUT + channels_Q, mask=channels_Q < 2 * OUT, other=0.0).to(
                tl.float32
            )[:, None]
        gate_NM, up_NM = tl.split(tl.permute(tl.reshape(both_QM, [BLOCK_N, 2, BLOCK_M]), [0, 2, 1]))
    else:
        gate_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, IN, BLOCK_K):
            x_KM = _inputs(x_ptrs_M, exists_M, start, IN, BLOCK_K)
            gate_NK = _weights(
                weights_expert,
                weights_map,
                expert,
                first,
                start,
                weights_stride_N,
                weights_stride_K,
                2 * OUT,
                IN,
                INPUTS_FIRST,
                BLOCK_N,
                BLOCK_K,
            )
            up_NK = _weights(
                weights_expert,
                weights_map,
                expert,
                OUT + first,
                start,
                weights_stride_N,
                weights_stride_K,
                2 * OUT,
                IN,
                INPUTS_FIRST,
                BLOCK_N,
                BLOCK_K,
            )
            gate_NM = _add_product(gate_NM, gate_NK, x_KM, gate_scales, start, SCALE_K, SCALE_COLUMNS, INTERPRETED)
            up_NM = _add_product(up_NM, up_NK, x_KM, up_scales, start, SCALE_K, SCALE_COLUMNS, INTERPRETED)
        if scales is not None and SCALE_COLUMNS == 1:
            gate_NM *= tl.load(gate_scales)
            up_NM *= tl.load(up_scales)
        if bias is not None:
            gate_NM += _bias(bias + expert * 2 * OUT, channels_N, OUT)
            up_NM += _bias(bias + expert * 2 * OUT + OUT, channels_N, OUT)
    if row_weights is not None:
        weights_M = tl.load(row_weights + assignments_M, mask=exists_M, other=0.0)
        gate_NM *= weights_M[None, :]
        up_NM *= weights_M[None, :]
    gated_NM = _gate(gate_NM, up_NM, limit, alpha, CLAMPED)
    _store(out, gated_NM, places_M, channels_N, exists_M, OUT)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_down(
    x,
    x_map,
    weights,
    weights_map,
    bias,
    scales,
    row_weights,
    order,
    tiles,
    out,
    num_tiles,
    weights_stride_E,
    weights_stride_N,
    weights_stride_K,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[assignment] = an expert's product with x[place], by the assignment's weight. With `x_map`, a descriptor of x
    in blocks of BLOCK_M rows, the rows of a tile are read by it."""
    blocks: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    tile, block = _tile_and_block(num_tiles, blocks)
    expert, places_M, exists_M = _places(tiles, tile, num_tiles, order is None, BLOCK_M)
    if expert < 0:
        return
    x_ptrs_M = x + places_M.to(tl.int64) * IN
    weights_expert = weights + expert.to(tl.int64) * weights_stride_E
    first = block * BLOCK_N
    channels_N = first + tl.arange(0, BLOCK_N)
    SCALE_ROWS: tl.constexpr = (OUT + SCALE_N - 1) // SCALE_N
    SCALE_COLUMNS: tl.constexpr = (IN + SCALE_K - 1) // SCALE_K
    if scales is not None:
        down_scales = scales + (expert * SCALE_ROWS + first // SCALE_N) * SCALE_COLUMNS
    else:
        down_scales = None
    first_place = tile if order is None else tl.load(tiles + num_tiles + tile)
    down_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, IN, BLOCK_K):
        if x_map is None:
            x_KM = _inputs(x_ptrs_M, exists_M, start, IN, BLOCK_K)
        else:  # past the expert's places stand the next one's, whose products are not stored
            x_KM = tl.trans(x_map.load([first_place, start]))
        down_NK = _weights(
            weights_expert,
            weights_map,
            expert,
            first,
            start,
            weights_stride_N,
            weights_stride_K,
            OUT,
            IN,
            INPUTS_FIRST,
            BLOCK_N,
            BLOCK_K,
        )
        down_NM = _add_product(down_NM, down_NK, x_KM, down_scales, start, SCALE_K, SCALE_COLUMNS, INTERPRETED)
    if scales is not None and SCALE_COLUMNS == 1:
        down_NM *= tl.load(down_scales)
    if bias is not None:
        down_NM += _bias(bias + expert * OUT, channels_N, OUT)
    assignments_M = _assignments(order, places_M, exists_M)
    if row_weights is not None:
        down_NM *= tl.load(row_weights + assignments_M, mask=exists_M, other=0.0)[None, :]
    _store(out, down_NM, assignments_M, channels_N, exists_M, OUT)


@triton.jit(do_not_specialize=["channels"])
def sum_choices(parts, plus, out, channels, plus_stride, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """A token's experts, always in the order of its choices, and what it has besides."""
    token = tl.program_id(0).to(tl.int64)
    channels_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists_N = channels_N < channels
    sum_N = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        row = (token * CHOICES + choice) * channels
        sum_N += tl.load(parts + row + channels_N, mask=exists_N, other=0.0).to(tl.float32)
    if plus is not None:
        sum_N += tl.load(plus + token * plus_stride + channels_N, mask=exists_N, other=0.0).to(tl.float32)
    tl.store(out + token * channels + channels_N, sum_N.to(out.dtype.element_ty), mask=exists_N)


@triton.jit
def _tile_and_block(num_tiles, BLOCKS: tl.constexpr):
    group = tl.program_id(0) // (GROUP_TILES * BLOCKS)
    first_tile = group * GROUP_TILES
    group_tiles = tl.minimum(num_tiles - first_tile, GROUP_TILES)
    within = tl.program_id(0) % (GROUP_TILES * BLOCKS)
    return first_tile + within % group_tiles, within // group_tiles


@triton.jit
def _places(tiles, tile, num_tiles, EACH: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, places, which of them are the expert's). EACH: every assignment is a tile."""
    expert = tl.load(tiles + tile).to(tl.int32)
    if EACH:
        first = tile
        stop = tile + 1
    else:
        first = tl.load(tiles + num_tiles + tile)
        stop = tl.load(tiles + 2 * num_tiles + tile)
    places_M = first + tl.arange(0, BLOCK_M)
    return expert, places_M, places_M < stop


@triton.jit
def _assignments(order, places_M, exists_M):
    assignments_M = places_M
    if order is not None:
        assignments_M = tl.load(order + places_M, mask=exists_M, other=0)
    return assignments_M


@triton.jit
def _inputs(x_ptrs_M, exists_M, start, IN: tl.constexpr, BLOCK_K: tl.constexpr):
    channels_K = start + tl.arange(0, BLOCK_K)
    mask_MK = exists_M[:, None]
    if IN % BLOCK_K:
        mask_MK = mask_MK & (channels_K < IN)[None, :]
    return tl.trans(tl.load(x_ptrs_M[:, None] + channels_K[None, :], mask=mask_MK, other=0.0))


@triton.jit
def _weights(
    weights,
    weights_map,
    expert,
    row,
    column,
    stride_N,
    stride_K,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of an expert's weights, 0 past their end. The copy engine's map has [E,N,K]; INPUTS_FIRST: [E,K,N]."""
    if weights_map is not None:
        if INPUTS_FIRST:
            tile_NK = tl.trans(tl.reshape(weights_map.load([expert, column, row]), [BLOCK_K, BLOCK_N]))
        else:
            tile_NK = tl.reshape(weights_map.load([expert, row, column]), [BLOCK_N, BLOCK_K])
    else:
        rows_N = row + tl.arange(0, BLOCK_N)
        columns_K = column + tl.arange(0, BLOCK_K)
        ptrs_NK = weights + rows_N[:, None] * stride_N + columns_K[None, :] * stride_K
        tile_NK = tl.load(ptrs_NK, mask=(rows_N < OUT)[:, None] & (columns_K < IN)[None, :], other=0.0)
    return tile_NK


@triton.jit
def _add_product(
    sum_NM, tile_NK, x_KM, scales, start, SCALE_K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr
):
    if INTERPRETED:
        tile_NK = tile_NK.to(tl.float32)
        x_KM = x_KM.to(tl.float32)
    else:
        tile_NK = tile_NK.to(x_KM.dtype)
    if scales is not None and SCALE_COLUMNS > 1:
        part_NM = tl.dot(tile_NK, x_KM, input_precision="ieee")
        sum_NM += part_NM * tl.load(scales + start // SCALE_K)
    else:
        sum_NM = tl.dot(tile_NK, x_KM, sum_NM, input_precision="ieee")
    return sum_NM


@triton.jit
def _bias(bias, channels_N, OUT: tl.constexpr):
    return tl.load(bias + channels_N, mask=channels_N < OUT, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _gate(gate_NM, up_NM, limit, alpha, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate_NM = tl.minimum(gate_NM, limit)
        up_NM = tl.minimum(tl.maximum(up_NM, -limit), limit) + 1.0
        gate_NM /= 1.0 + tl.exp(-alpha * gate_NM)
    else:
        gate_NM /= 1.0 + tl.exp(-gate_NM)
    return gate_NM * up_NM


@triton.jit
def _store(out, values_NM, rows_M, channels_N, exists_M, OUT: tl.constexpr):
    values_MN = tl.trans(values_NM).to(out.dtype.element_ty)
    ptrs_MN = out + rows_M.to(tl.int64)[:, None] * OUT + channels_N[None, :]
    tl.store(ptrs_MN, values_MN, mask=exists_M[:, None] & (channels_N < OUT)[None, :])
