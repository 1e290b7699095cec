"""Products of many rows with integers of 4 bits on Hopper, in Gluon: the weight comes from registers, the activations
from shared memory, and the two warpgroups multiply while they unpack the next step's weight.

A thread has eight bytes of a row next to each other, as `baton.models.kernels.quantized.packed_hopper` says, but these
tensor cores want four of its numbers from each of two runs of eight. So not the weight but the activations are put in
another order first (`in_order`): then a thread's numbers are already where they belong, and nothing is exchanged
between threads.

Legend: N output channel, T token, K input channel, B byte of packed numbers; `_W`, `_A` and `_C` are in the layouts of
the stored weight, of the multiplied one and of the result.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from baton.models.kernels.quantized.packed_hopper_split import sum_of_tile
from baton.models.kernels.quantized.packed_hopper_unpack import less_zeros
from baton.tritonlib.gluon_launch import await_predecessors, await_threads, start_dependents

ROWS = 128  # of a tile, 64 for each warpgroup
WARPS = 8
STAGES = 4  # of steps that are in shared memory or in flight


@gluon.constexpr_function
def _stored(num_bytes: int) -> gl.DistributedLinearLayout:
    """Bytes of ROWS rows: of every 32, four threads have eight each."""
    of_registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    if num_bytes == 64:
        of_registers.append([0, 32])
    of_lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    of_warps = [[16, 0], [32, 0], [64, 0]]
    return gl.DistributedLinearLayout(of_registers, of_lanes, of_warps, [], [128, num_bytes])


@gluon.jit
def _copy(stored, x, weights, inputs, full, step, place, row, token, PART: gl.constexpr):
    """Starts copying a step's weights (PART 0), its activations (1), or both (2)."""
    if PART != 1:
        mbarrier.expect(full.index(place), stored.block_type.nbytes + x.block_type.nbytes)
        start = step * stored.block_type.shape[1]
        tma.async_copy_global_to_shared(stored, [row, start], full.index(place), weights.index(place))
    if PART != 0:
        start = step * x.block_type.shape[1]
        tma.async_copy_global_to_shared(x, [token, start], full.index(place), inputs.index(place))


@gluon.jit
def _unpacked(weights, full, turn, zeros_ptr, group, rows_W, num_rows, A: gl.constexpr, STAGES: gl.constexpr):
    """[ROWS, STEP], `_A`: a step's numbers less their zeros, inputs in the order of `in_order`."""
    ROWS: gl.constexpr = weights.shape[1]
    BYTES: gl.constexpr = weights.shape[2]
    W: gl.constexpr = _stored(BYTES)
    if zeros_ptr is not None:
        zeros_W = (gl.load(zeros_ptr + group * num_rows + rows_W).to(gl.float32) + 128.0).to(gl.bfloat16)
        less_W = gl.zeros([ROWS, BYTES], gl.bfloat16, W) + zeros_W[:, None]
    else:
        less_W = gl.full([ROWS, BYTES], 136.0, gl.bfloat16, W)
    mbarrier.wait(full.index(turn % STAGES), (turn // STAGES) & 1)
    low_W, high_W = less_zeros(weights.index(turn % STAGES).load(W), less_W)
    # Eight adjacent bytes of a thread are numbers of two runs of four, each of which is in two products' registers.
    both = gl.join(low_W, high_W).reshape([ROWS, BYTES // 32, 4, 2, 2, 2, 2]).permute((0, 6, 1, 3, 4, 2, 5))
    return gl.convert_layout(both.reshape([ROWS, 2 * BYTES]), A)


@gluon.jit
def _keep(numbers, out_ptr, num_tokens, STEP: gl.constexpr, A: gl.constexpr):
    """Keeps the numbers in their registers until this call.

    NOTE: tensor cores read them until the wait for their product, but the assembler gives registers away after the
    instruction that begins it: without a later use the next step's numbers are unpacked into them.
    """
    if num_tokens < 0:
        rows, places = gl.arange(0, 128, gl.SliceLayout(1, A)), gl.arange(0, STEP, gl.SliceLayout(0, A))
        gl.store(out_ptr + rows[:, None] * STEP + places[None, :], numbers)


@gluon.jit(do_not_specialize=["num_tokens", "splits", "token_tiles"])
def multiply_many_rows(
    x,
    stored,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    token_tiles,
    splits,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes ROWS outputs of TOKENS tokens, or a program's share of their steps, like
    `packed_hopper.multiply_packed`.

    Args:
        x: descriptor of the activations, in order, in boxes of [TOKENS, STEP].
        stored: descriptor of the weight, in boxes of [ROWS, STEP / 2].
    """
    BYTES: gl.constexpr = STEP // 2
    ROWS: gl.constexpr = stored.block_type.shape[0]
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    W: gl.constexpr = _stored(BYTES)
    token_tile = gl.program_id(0) % token_tiles
    tile = gl.program_id(0) // token_tiles // splits
    split = gl.program_id(0) // token_tiles % splits
    row, token = tile * ROWS, token_tile * TOKENS
    steps: gl.constexpr = COLUMNS // STEP
    first, stop = split * steps // splits, (split + 1) * steps // splits
    start_dependents(OVERLAP)

    weights = gl.allocate_shared_memory(gl.uint8, [STAGES, ROWS, BYTES], stored.layout)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, STEP], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    await_threads()
    for stage in gl.static_range(STAGES):
        if first + stage < stop:
            _copy(stored, x, weights, inputs, full, first + stage, stage, row, token, 0)
    await_predecessors(OVERLAP)
    for stage in gl.static_range(STAGES):
        if first + stage < stop:
            _copy(stored, x, weights, inputs, full, first + stage, stage, row, token, 1)

    rows_W = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, W)), num_rows - 1)
    rows_C = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, C)), num_rows - 1)
    nothing_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    sum_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    scales = gl.load(scales_ptr + first * STEP // GROUP * num_rows + rows_C).to(gl.float32)
    numbers = _unpacked(weights, full, 0, zeros_ptr, first * STEP // GROUP, rows_W, num_rows, A, STAGES)
    for step in range(first, stop - 1):
        turn = step - first
        group = (step + 1) * STEP // GROUP
        inputs_KT = inputs.index(turn % STAGES).permute((1, 0))
        product = warpgroup_mma(numbers, inputs_KT, nothing_C, use_acc=False, is_async=True)
        next_scales = gl.load(scales_ptr + group * num_rows + rows_C).to(gl.float32)
        next_numbers = _unpacked(weights, full, turn + 1, zeros_ptr, group, rows_W, num_rows, A, STAGES)
        product_C, numbers = warpgroup_mma_wait(0, deps=(product, numbers))
        _keep(numbers, out_ptr, num_tokens, STEP, A)
        await_threads()  # both warpgroups have read the step
        if step + STAGES < stop:
            _copy(stored, x, weights, inputs, full, step + STAGES, turn % STAGES, row, token, 2)
        sum_C += product_C * scales[:, None]
        numbers, scales = next_numbers, next_scales
    inputs_KT = inputs.index((stop - 1 - first) % STAGES).permute((1, 0))
    product_C = warpgroup_mma(numbers, inputs_KT, nothing_C, use_acc=False)
    sum_C += product_C * scales[:, None]

    tile_of_all = tile * token_tiles + token_tile
    is_last, sum_C = sum_of_tile(sum_C, partial_ptr, arrived_ptr, tile_of_all, split, splits, ROWS, TOKENS, C)
    if is_last:
        if bias_ptr is not None:
            sum_C += gl.load(bias_ptr + rows_C).to(gl.float32)[:, None]
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1])
        out = gl.convert_layout(sum_C.to(gl.bfloat16), OUT)
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        tokens = token + gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))
        places = out_ptr + tokens.to(gl.int64)[None, :] * num_rows + rows[:, None]
        gl.store(places, out, mask=(tokens < num_tokens)[None, :] & (rows < num_rows)[:, None])
