"""Products with integers of 4 bits on Hopper, in Gluon: the copy engine (TMA) brings weights and activations to shared
memory, and two warpgroups unpack the next step's weights while the tensor cores multiply this step's.

A warp of its own begins the copies, because each copy takes it as long as a product takes the tensor cores.

Legend: N output channel, T token, K input channel; `_W` and `_C` are in the layouts of a weight in strips
(`packed_hopper_strips`) and of the result.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from baton.models.kernels.quantized.packed_hopper_split import sum_of_tile
from baton.models.kernels.quantized.packed_hopper_strips import (
    LESS,
    STRIP_ROWS,
    as_operand,
    in_bfloat16,
    of_rows,
    output_of,
    pairs_layout,
    rows_layout,
    words_layout,
)
from baton.tritonlib.gluon_launch import await_predecessors, start_dependents

# Rows of a tile, one half for each warpgroup.
ROWS = gl.constexpr(128)
_HALF = gl.constexpr(64)
WARPS = 4  # of the first warpgroup; the launch adds the second one and the copying warp
# Steps whose scales and zeros are copied at once.
BLOCK = gl.constexpr(4)


class Operands(NamedTuple):
    """Descriptors of matrices in memory: the activations in boxes of [TOKENS, STEP], the weight in boxes of
    [ROWS / 16, 2 STEP] words, its scales and zeros in boxes of [BLOCK, ROWS]. Zeros may be missing."""

    x: gl.tensor
    stored: gl.tensor
    scales: gl.tensor
    zeros: gl.tensor


class Work(NamedTuple):
    """A program's outputs and steps [first, stop); `split` is its number among the programs that share the tile."""

    row: gl.tensor
    token: gl.tensor
    tile: gl.tensor
    split: gl.tensor
    splits: gl.tensor
    first: gl.tensor
    stop: gl.tensor


class Stages(NamedTuple):
    """Shared memory: steps that are there or in flight, and BLOCKs of steps' scales and zeros, for which the BLOCK's
    first step waits too. Where there are no zeros, scales take their place."""

    weights: gl.shared_memory_descriptor
    inputs: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    zeros: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Results(NamedTuple):
    """Memory that a program writes; `partial` is missing if every tile has one program."""

    bias: gl.tensor
    out: gl.tensor
    partial: gl.tensor
    arrived: gl.tensor
    num_tokens: gl.tensor
    num_rows: gl.tensor


@gluon.jit(do_not_specialize=["num_tokens", "num_columns", "splits", "token_tiles"])
def multiply_by_copies(
    x,
    stored,
    scales,
    zeros,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_columns,
    token_tiles,
    splits,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED: gl.constexpr,
    REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes ROWS outputs of some tokens, or a program's share of their steps, like `packed_hopper_few`.

    Args:
        x, stored, scales, zeros: `Operands`.
        SCALED: numbers are multiplied by their scales in bfloat16; else a step's sums are, in float32.
        REGISTERS: of a thread that multiplies.
    """
    STEP: gl.constexpr = x.block_type.shape[1]
    token_tile = gl.program_id(0) % token_tiles
    row_tile = gl.program_id(0) // token_tiles // splits
    split = gl.program_id(0) // token_tiles % splits
    steps = num_columns // STEP
    first, stop = split * steps // splits, (split + 1) * steps // splits
    tile = row_tile * token_tiles + token_tile
    work = Work(row_tile * ROWS, token_tile * x.block_type.shape[0], tile, split, splits, first, stop)
    operands = Operands(x, stored, scales, zeros)
    results = Results(bias_ptr, out_ptr, partial_ptr, arrived_ptr, num_tokens, num_rows)
    stages = _new_stages(operands, STAGES)
    gl.warp_specialize(
        [
            (_multiply, (0, stages, work, results, GROUP, SCALED, OVERLAP)),
            (_multiply, (1, stages, work, results, GROUP, SCALED, OVERLAP)),
            (_copy, (operands, stages, work, GROUP, OVERLAP)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit
def _new_stages(operands, STAGES: gl.constexpr):
    x, stored, scales = operands.x, operands.stored, operands.scales
    # So many that all steps of a block have left their stages before the block is overwritten.
    BLOCKS: gl.constexpr = (STAGES + 2 * BLOCK - 2) // BLOCK
    weights = gl.allocate_shared_memory(
        gl.int32, [STAGES, ROWS // STRIP_ROWS, stored.block_type.shape[1]], stored.layout
    )
    inputs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, x.block_type.shape[0], x.block_type.shape[1]], x.layout)
    factors = gl.allocate_shared_memory(scales.dtype, [BLOCKS, BLOCK, ROWS], scales.layout)
    offsets = factors
    if operands.zeros is not None:
        offsets = gl.allocate_shared_memory(gl.uint8, [BLOCKS, BLOCK, ROWS], operands.zeros.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return Stages(weights, inputs, factors, offsets, full, empty)


@gluon.jit
def _copy(operands, stages, work, GROUP: gl.constexpr, OVERLAP: gl.constexpr):
    """Copies the program's steps, and waits for both warpgroups before it takes a stage again."""
    STAGES: gl.constexpr = stages.weights.shape[0]
    for stage in gl.static_range(STAGES):
        if work.first + stage < work.stop:
            _copy_weights(operands, stages, work, stage, GROUP)
    await_predecessors(OVERLAP)
    for stage in gl.static_range(STAGES):
        if work.first + stage < work.stop:
            _copy_inputs(operands, stages, work, stage)
    for turn in range(STAGES, work.stop - work.first):
        mbarrier.wait(stages.empty.index(turn % STAGES), ((turn // STAGES) & 1) ^ 1)
        _copy_weights(operands, stages, work, turn, GROUP)
        _copy_inputs(operands, stages, work, turn)


@gluon.jit
def _copy_weights(operands, stages, work, turn, GROUP: gl.constexpr):
    """Starts copying a step's weights; the first of every BLOCK steps brings the scales and zeros of all of them."""
    scales, zeros = operands.scales, operands.zeros
    STEP: gl.constexpr = operands.x.block_type.shape[1]
    num_bytes: gl.constexpr = operands.stored.block_type.nbytes + operands.x.block_type.nbytes
    place = turn % stages.weights.shape[0]
    full = stages.full.index(place)
    step = work.first + turn
    if turn % BLOCK == 0:
        block = turn // BLOCK % stages.scales.shape[0]
        if zeros is None:
            mbarrier.expect(full, num_bytes + scales.block_type.nbytes)
        else:
            mbarrier.expect(full, num_bytes + scales.block_type.nbytes + zeros.block_type.nbytes)
            tma.async_copy_global_to_shared(zeros, [step * STEP // GROUP, work.row], full, stages.zeros.index(block))
        tma.async_copy_global_to_shared(scales, [step * STEP // GROUP, work.row], full, stages.scales.index(block))
    else:
        mbarrier.expect(full, num_bytes)
    start = [work.row // STRIP_ROWS, step * (2 * STEP)]
    tma.async_copy_global_to_shared(operands.stored, start, full, stages.weights.index(place))


@gluon.jit
def _copy_inputs(operands, stages, work, turn):
    place = turn % stages.weights.shape[0]
    start = (work.first + turn) * operands.x.block_type.shape[1]
    full = stages.full.index(place)
    tma.async_copy_global_to_shared(operands.x, [work.token, start], full, stages.inputs.index(place))


@gluon.jit
def _multiply(
    HALF: gl.constexpr,
    stages,
    work,
    results,
    GROUP: gl.constexpr,
    SCALED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes one half of the tile's rows: the work of one warpgroup."""
    TOKENS: gl.constexpr = stages.inputs.shape[1]
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    start_dependents(OVERLAP)
    sum_C = gl.zeros([_HALF, TOKENS], gl.float32, C)
    mbarrier.wait(stages.full.index(0), 0)
    first = work.first
    numbers = _unpacked(HALF, stages, first, 0, GROUP, SCALED)
    scales = _scales(HALF, stages, first, 0, GROUP, C)
    # Two turns at once: after one, numbers would have to move to the registers that the next one reads.
    turns = work.stop - first - 1
    for turn in range(0, turns // 2 * 2, 2):
        others, factors, sum_C = _turn(numbers, scales, sum_C, turn, HALF, stages, first, results, GROUP, SCALED)
        numbers, scales, sum_C = _turn(others, factors, sum_C, turn + 1, HALF, stages, first, results, GROUP, SCALED)
    if turns % 2 == 1:
        numbers, scales, sum_C = _turn(numbers, scales, sum_C, turns - 1, HALF, stages, first, results, GROUP, SCALED)
    product_C = _product(numbers, sum_C, stages, turns, SCALED, False)
    sum_C = product_C if SCALED else sum_C + product_C * scales[:, None]
    half, partial = 2 * work.tile + HALF, results.partial
    is_last, sum_C = sum_of_tile(sum_C, partial, results.arrived, half, work.split, work.splits, _HALF, TOKENS, C)
    if is_last:
        _store(sum_C * LESS, HALF, work, results)


@gluon.jit
def _turn(
    numbers,
    scales,
    sum_C,
    turn,
    HALF: gl.constexpr,
    stages,
    first,
    results,
    GROUP: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Multiplies a step's numbers while it unpacks the next step's; returns those, their scales and the sum."""
    STAGES: gl.constexpr = stages.inputs.shape[0]
    C: gl.constexpr = sum_C.type.layout
    product = _product(numbers, sum_C, stages, turn, SCALED, True)
    mbarrier.wait(stages.full.index((turn + 1) % STAGES), ((turn + 1) // STAGES) & 1)
    next_scales = _scales(HALF, stages, first, turn + 1, GROUP, C)
    next_numbers = _unpacked(HALF, stages, first, turn + 1, GROUP, SCALED)
    _keep(next_numbers, results)
    product_C, numbers = warpgroup_mma_wait(0, deps=(product, numbers))
    _keep(numbers, results)
    mbarrier.arrive(stages.empty.index(turn % STAGES), count=1)
    sum_C = product_C if SCALED else sum_C + product_C * scales[:, None]
    return next_numbers, next_scales, sum_C


@gluon.jit
def _product(numbers, sum_C, stages, turn, SCALED: gl.constexpr, IS_ASYNC: gl.constexpr):
    """A step's product, which SCALED adds to the sum; IS_ASYNC only begins it."""
    inputs_KT = stages.inputs.index(turn % stages.inputs.shape[0]).permute((1, 0))
    if SCALED:
        product = warpgroup_mma(numbers, inputs_KT, sum_C, is_async=IS_ASYNC)
    else:
        C: gl.constexpr = sum_C.type.layout
        nothing_C = gl.zeros([sum_C.shape[0], sum_C.shape[1]], gl.float32, C)
        product = warpgroup_mma(numbers, inputs_KT, nothing_C, use_acc=False, is_async=IS_ASYNC)
    return product


@gluon.jit
def _unpacked(HALF: gl.constexpr, stages, first, turn, GROUP: gl.constexpr, SCALED: gl.constexpr):
    """[_HALF, STEP]: a step's numbers less their zeros, as the operand of a product."""
    WORDS: gl.constexpr = stages.weights.shape[2]
    LOADS: gl.constexpr = WORDS // 128
    P: gl.constexpr = pairs_layout(4, LOADS)
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, stages.inputs.shape[1], 16])
    halves = stages.weights.index(turn % stages.weights.shape[0])._reinterpret(gl.int32, [2, 4, WORDS], _flat(2))
    words_W = halves.index(HALF).load(words_layout(4, LOADS))
    zeros_P = None
    if stages.zeros.dtype == gl.uint8:
        zeros = _of_half(stages.zeros, HALF, stages, first, turn, GROUP)
        zeros_P = zeros._reinterpret(gl.uint16, [4, 8], _flat(2)).load(P)
    scales_P = None
    if SCALED:
        scales = _of_half(stages.scales, HALF, stages, first, turn, GROUP)
        scales_P = scales._reinterpret(gl.int32, [4, 8], _flat(2)).load(P)
        if scales.dtype == gl.float16:
            scales_P = in_bfloat16(scales_P)
    return as_operand(words_W, zeros_P, scales_P, 4, LOADS, C)


@gluon.constexpr_function
def _flat(rank: int) -> gl.SwizzledSharedLayout:
    return gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=list(range(rank))[::-1])


@gluon.jit
def _of_half(blocks, HALF: gl.constexpr, stages, first, turn, GROUP: gl.constexpr):
    """[_HALF]: the scales or zeros of a warpgroup's rows in a step."""
    STEP: gl.constexpr = stages.inputs.shape[2]
    group = (first + turn) * STEP // GROUP - (first + turn // BLOCK * BLOCK) * STEP // GROUP
    block = blocks.index(turn // BLOCK % blocks.shape[0])._reinterpret(blocks.dtype, [2 * BLOCK, _HALF], _flat(1))
    return block.index(2 * group + HALF)


@gluon.jit
def _scales(HALF: gl.constexpr, stages, first, turn, GROUP: gl.constexpr, C: gl.constexpr):
    """float32 [_HALF], in the order of the result's rows."""
    scales = _of_half(stages.scales, HALF, stages, first, turn, GROUP)
    return of_rows(scales._reinterpret(scales.dtype, [4, 8, 2], _flat(3)).load(rows_layout(4)), C)


@gluon.jit
def _keep(numbers, results):
    """Keeps the numbers in their registers until this call, and computes them before what follows.

    NOTE: tensor cores read them until the wait for their product, but the assembler gives registers away after the
    instruction that begins it: without a later use the next step's numbers are unpacked into them. And without a use
    before that wait, it unpacks the next step's numbers after the wait.
    """
    if results.num_tokens < 0:
        rows = gl.arange(0, numbers.shape[0], gl.SliceLayout(1, numbers.type.layout))
        places = gl.arange(0, numbers.shape[1], gl.SliceLayout(0, numbers.type.layout))
        gl.store(results.out + rows[:, None] * numbers.shape[1] + places[None, :], numbers)


@gluon.jit
def _store(sum_C, HALF: gl.constexpr, work, results):
    C: gl.constexpr = sum_C.type.layout
    rows_C = work.row + _HALF * HALF + output_of(gl.arange(0, _HALF, gl.SliceLayout(1, C)))
    tokens_C = work.token + gl.arange(0, sum_C.shape[1], gl.SliceLayout(0, C))
    num_rows = results.num_rows
    if results.bias is not None:
        sum_C += gl.load(results.bias + gl.minimum(rows_C, num_rows - 1)).to(gl.float32)[:, None]
    places_C = results.out + tokens_C.to(gl.int64)[None, :] * num_rows + rows_C[:, None]
    exists_C = (tokens_C < results.num_tokens)[None, :] & (rows_C < num_rows)[:, None]
    gl.store(places_C, sum_C.to(gl.bfloat16), mask=exists_C)
