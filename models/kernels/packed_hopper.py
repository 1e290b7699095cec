"""Products of few rows with weights of 4 bits on Hopper, in Gluon: integers less their zeros, or mxfp4.

Stages of weights are copied to shared memory ahead of their use. From there each thread loads the bytes of just those
numbers that it multiplies, and unpacks four of them at once. The low and the high halves of a tile's bytes are the
channels of two products (`models.quantization.packed`), and a byte's place is the same in both.

Gluon's tuples grow by addition alone. Legend: N output channel, T token, B byte of packed numbers; `_A`, `_X` and `_C`
are in the layouts of the weight, the activations and the result.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

RUN = gl.constexpr(16)  # that of `models.quantization.packed`
WARPS = 4


@gluon.constexpr_function
def _eights(rows: int, num_bytes: int) -> gl.DistributedLinearLayout:
    """The weight's layout with each row's bytes apart in eights, of which a thread has all."""
    of_registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]]
    if num_bytes == 64:
        of_registers.append([0, 4, 0])
    if rows == 128:
        of_registers.append([64, 0, 0])
    of_lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    of_warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(of_registers, of_lanes, of_warps, [], [rows, num_bytes // 8, 8])


@gluon.jit
def start_dependents(OVERLAP: gl.constexpr):
    """As `tritonlib.launch` says, in Gluon."""
    if OVERLAP:
        _do("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def await_predecessors(OVERLAP: gl.constexpr):
    """As `tritonlib.launch` says, in Gluon."""
    if OVERLAP:
        _do("griddepcontrol.wait; // $0")


@gluon.jit
def _do(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def less_zeros(bytes_A, zeros_A):
    """(low halves, high halves) of bytes less zeros, which are 128 more than they are; bfloat16, exact.

    A number is the last bits of 128 + number.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        shr.u32 high, $4, 4;
        prmt.b32 $0, $4, 0x43434343, 0x4140;
        prmt.b32 $1, $4, 0x43434343, 0x4342;
        prmt.b32 $2, high, 0x43434343, 0x4140;
        prmt.b32 $3, high, 0x43434343, 0x4342;
        and.b32 $0, $0, 0xff0fff0f;
        and.b32 $1, $1, 0xff0fff0f;
        and.b32 $2, $2, 0xff0fff0f;
        and.b32 $3, $3, 0xff0fff0f;
        sub.rn.bf16x2 $0, $0, $5;
        sub.rn.bf16x2 $1, $1, $6;
        sub.rn.bf16x2 $2, $2, $5;
        sub.rn.bf16x2 $3, $3, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [bytes_A, zeros_A],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def from_mxfp4(bytes_A, scales_A):
    """(low halves, high halves) of bytes, as floats of 4 bits times scales; bfloat16, exact.

    The bits of a float of 4 bits, put at the end of bfloat16's exponent and the beginning of its fraction, are the
    float times 2 ** -126, also where it is below 1. So `scales_A` are 2 ** 126 times the scales.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 pair, sign, rest;
        prmt.b32 pair, $4, 0, 0x1404;
        shl.b32 sign, pair, 4;
        shr.u32 rest, pair, 2;
        and.b32 rest, rest, 0x01c001c0;
        lop3.b32 $0, sign, 0x80008000, rest, 0xea;
        shr.u32 rest, pair, 6;
        and.b32 rest, rest, 0x01c001c0;
        lop3.b32 $2, pair, 0x80008000, rest, 0xea;
        prmt.b32 pair, $4, 0, 0x3424;
        shl.b32 sign, pair, 4;
        shr.u32 rest, pair, 2;
        and.b32 rest, rest, 0x01c001c0;
        lop3.b32 $1, sign, 0x80008000, rest, 0xea;
        shr.u32 rest, pair, 6;
        and.b32 rest, rest, 0x01c001c0;
        lop3.b32 $3, pair, 0x80008000, rest, 0xea;
        mul.rn.bf16x2 $0, $0, $5;
        mul.rn.bf16x2 $1, $1, $6;
        mul.rn.bf16x2 $2, $2, $5;
        mul.rn.bf16x2 $3, $3, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [bytes_A, scales_A],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def packed_sum(
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    x_rows_X,
    row,
    num_rows,
    first,
    stop,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    MXFP4: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
    STAGED_X: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """float32 [ROWS, TOKENS], `_C`: the products of steps [first, stop) of the rows from `row` on. Rows past the end
    are those of the last one.

    Args:
        x_rows_X: where each token's activations begin.
        GROUP: inputs with one scale, a multiple of STEP; mxfp4 has groups of 32.
        STEP: inputs of one step, of which COLUMNS is a multiple.
        AT_ONCE: steps of a stage.
        STAGES: those whose weights are in shared memory or on their way there.
        STAGED_X: the activations of a stage are in shared memory too; else each thread loads those that it multiplies.
        OVERLAP: the weights' way begins before the kernels before this one have ended.
    """
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 8)
    X: gl.constexpr = gl.DotOperandLayout(1, C, 8)
    BYTES: gl.constexpr = STEP // 2
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BYTES, BYTES // 16], [4, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(vec=16, per_phase=1, max_phase=BYTES // 16, order=[1, 0])
    stages = gl.allocate_shared_memory(gl.uint8, [STAGES * AT_ONCE, ROWS, BYTES], SWIZZLED)
    rows_R = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, COPY)), num_rows - 1)
    stored = stored_ptr + rows_R.to(gl.int64)[:, None] * (COLUMNS // 2)
    stored += gl.arange(0, BYTES, gl.SliceLayout(0, COPY))[None, :]
    for stage in gl.static_range(STAGES - 1):
        copy_weights(stages, stored, stage, first + stage * AT_ONCE, stop, BYTES, AT_ONCE)
        if not STAGED_X:
            async_copy.commit_group()
    halves = None
    if STAGED_X:
        COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BYTES, BYTES // 8], [4, 1], [1, 0])
        SWIZZLED_X: gl.constexpr = gl.SwizzledSharedLayout(vec=32, per_phase=1, max_phase=BYTES // 32, order=[1, 0])
        halves = gl.allocate_shared_memory(gl.bfloat16, [STAGES * AT_ONCE * 2, TOKENS, BYTES], SWIZZLED_X)
        x_rows_T = gl.convert_layout(x_rows_X, gl.SliceLayout(1, COPY_X))
        x = x_rows_T[:, None] + inputs_of_halves(BYTES, gl.SliceLayout(0, COPY_X))[None, :]
    else:
        x = x_rows_X[None, :] + inputs_of_halves(BYTES, gl.SliceLayout(1, X))[:, None]
    sum_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    nothing_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    # A step's scales and zeros are loaded one turn before.
    scales = load_scales(scales_ptr, row, num_rows, first, stop, COLUMNS, GROUP, MXFP4, ROWS, STEP, AT_ONCE)
    zeros = load_zeros(zeros_ptr, row, num_rows, first, stop, GROUP, ROWS, STEP, AT_ONCE)
    await_predecessors(OVERLAP)
    if STAGED_X:
        for stage in gl.static_range(STAGES - 1):
            copy_x(halves, x, stage, first + stage * AT_ONCE, stop, BYTES, AT_ONCE)
            async_copy.commit_group()  # the first one has all weights so far
    for some in range(first, stop, AT_ONCE):
        turn = (some - first) // AT_ONCE
        low, high = (), ()
        if not STAGED_X:
            for one in gl.static_range(AT_ONCE):
                start = gl.minimum(some + one, stop - 1) * STEP
                low = low + (gl.load(x + start),)
                high = high + (gl.load(x + (start + RUN)),)
        async_copy.wait_group(STAGES - 2)
        stored_bytes = ()
        for one in gl.static_range(AT_ONCE):
            place = turn % STAGES * AT_ONCE + one
            stored_bytes = stored_bytes + (stages.index(place).load(A),)
            if STAGED_X:
                low = low + (halves.index(2 * place).permute((1, 0)).load(X),)
                high = high + (halves.index(2 * place + 1).permute((1, 0)).load(X),)
        ahead = STAGES - 1
        copy_weights(stages, stored, (turn + ahead) % STAGES, some + ahead * AT_ONCE, stop, BYTES, AT_ONCE)
        if STAGED_X:
            copy_x(halves, x, (turn + ahead) % STAGES, some + ahead * AT_ONCE, stop, BYTES, AT_ONCE)
        async_copy.commit_group()
        for one in gl.static_range(AT_ONCE):
            exists = some + one < stop
            if MXFP4:
                # A step past the end has zeros for weights.
                exponents = gl.where(exists, scales[one], -126)
                low_A, high_A = from_mxfp4(stored_bytes[one], mxfp4_factors(exponents, ROWS, BYTES))
                sum_C = mma_v2(low_A, low[one], sum_C)
                sum_C = mma_v2(high_A, high[one], sum_C)
            else:
                if zeros_ptr is not None:
                    halves_A = (zeros[one] + 128.0).to(gl.bfloat16)
                    less_A = gl.zeros([ROWS, BYTES], gl.bfloat16, A) + halves_A[:, None]
                else:
                    less_A = gl.full([ROWS, BYTES], 136.0, gl.bfloat16, A)
                low_A, high_A = less_zeros(stored_bytes[one], less_A)
                product_C = mma_v2(low_A, low[one], nothing_C)
                product_C = mma_v2(high_A, high[one], product_C)
                sum_C += product_C * gl.where(exists, scales[one], 0.0)[:, None]
        following = some + AT_ONCE
        scales = load_scales(scales_ptr, row, num_rows, following, stop, COLUMNS, GROUP, MXFP4, ROWS, STEP, AT_ONCE)
        zeros = load_zeros(zeros_ptr, row, num_rows, following, stop, GROUP, ROWS, STEP, AT_ONCE)
    async_copy.wait_group(0)
    return sum_C


@gluon.jit
def load_scales(
    scales_ptr,
    row,
    num_rows,
    step,
    stop,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    MXFP4: gl.constexpr,
    ROWS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """The scales of each step of a turn, float32 [ROWS]; of mxfp4 `mxfp4_exponents`."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    rows_C = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, C)), num_rows - 1)
    scales = ()
    for one in gl.static_range(AT_ONCE):
        start = gl.minimum(step + one, stop - 1) * STEP
        if MXFP4:
            of_step = mxfp4_exponents(scales_ptr, row, num_rows, start // 32, COLUMNS // 32, ROWS, STEP // 2)
        else:
            of_step = gl.load(scales_ptr + start // GROUP * num_rows + rows_C).to(gl.float32)
        scales = scales + (of_step,)
    return scales


@gluon.jit
def load_zeros(
    zeros_ptr,
    row,
    num_rows,
    step,
    stop,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """The zeros of each step of a turn, float32 [ROWS]; nothing where there are none."""
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 8)
    zeros = ()
    if zeros_ptr is not None:
        rows_A = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, A)), num_rows - 1)
        for one in gl.static_range(AT_ONCE):
            group = gl.minimum(step + one, stop - 1) * STEP // GROUP
            zeros = zeros + (gl.load(zeros_ptr + group * num_rows + rows_A).to(gl.float32),)
    return zeros


@gluon.jit
def inputs_of_halves(BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    """int32 [BYTES]: the input of each byte's low half, counted from the step's first one."""
    bytes_B = gl.arange(0, BYTES, LAYOUT)
    return bytes_B // RUN * (2 * RUN) + bytes_B % RUN


@gluon.jit
def copy_weights(stages, stored, stage, step, stop, BYTES: gl.constexpr, AT_ONCE: gl.constexpr):
    """Begins to copy the weights of a stage; those past the last step are that step's."""
    for one in gl.static_range(AT_ONCE):
        async_copy.async_copy_global_to_shared(
            stages.index(stage * AT_ONCE + one), stored + gl.minimum(step + one, stop - 1) * BYTES
        )


@gluon.jit
def copy_x(halves, x, stage, step, stop, BYTES: gl.constexpr, AT_ONCE: gl.constexpr):
    """Begins to copy the activations of a stage, those of low halves apart from those of high ones."""
    for one in gl.static_range(AT_ONCE):
        place, start = 2 * (stage * AT_ONCE + one), gl.minimum(step + one, stop - 1) * (2 * BYTES)
        async_copy.async_copy_global_to_shared(halves.index(place), x + start)
        async_copy.async_copy_global_to_shared(halves.index(place + 1), x + (start + RUN))


@gluon.jit
def mxfp4_exponents(
    scales_ptr, row, num_rows, first_group, GROUPS: gl.constexpr, ROWS: gl.constexpr, BYTES: gl.constexpr
):
    """int32 [ROWS, eights of bytes]: the exponent of each eight's group, of which a row has GROUPS."""
    EIGHTS: gl.constexpr = _eights(ROWS, BYTES)
    OF_EIGHTS: gl.constexpr = gl.SliceLayout(2, EIGHTS)
    rows_R = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, OF_EIGHTS)), num_rows - 1)
    groups_G = first_group + gl.arange(0, BYTES // 8, gl.SliceLayout(0, OF_EIGHTS)) // 2
    return gl.load(scales_ptr + rows_R.to(gl.int64)[:, None] * GROUPS + groups_G[None, :]).to(gl.int32)


@gluon.jit
def mxfp4_factors(exponents_RG, ROWS: gl.constexpr, BYTES: gl.constexpr):
    """bfloat16 [ROWS, BYTES]: 2 ** 126 times the scale of each byte's group."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, C, 8)
    EIGHTS: gl.constexpr = _eights(ROWS, BYTES)
    factors_RG = ((exponents_RG + 126) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    factors_RGB = gl.zeros([ROWS, BYTES // 8, 8], gl.bfloat16, EIGHTS) + gl.expand_dims(factors_RG, 2)
    return gl.convert_layout(gl.reshape(factors_RGB, [ROWS, BYTES]), A)


@gluon.jit(do_not_specialize=["num_tokens", "splits"])
def multiply_packed(
    x_ptr,
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    x_stride,
    splits,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
    STAGED_X: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """ROWS outputs of TOKENS tokens, or a program's share of their steps. Programs that share a tile write partial
    sums, which the last one to arrive adds up in the order of the programs."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, C, 8)
    tile, split = gl.program_id(0) // splits, gl.program_id(0) % splits
    steps = COLUMNS // STEP
    tokens_X = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, X))
    x_rows_X = x_ptr + gl.minimum(tokens_X, num_tokens - 1).to(gl.int64) * x_stride
    first, stop = split * steps // splits, (split + 1) * steps // splits
    start_dependents(OVERLAP)
    sum_C = packed_sum(
        stored_ptr,
        scales_ptr,
        zeros_ptr,
        x_rows_X,
        tile * ROWS,
        num_rows,
        first,
        stop,
        COLUMNS,
        GROUP,
        False,
        ROWS,
        TOKENS,
        STEP,
        AT_ONCE,
        STAGES,
        STAGED_X,
        OVERLAP,
    )
    rows_C = gl.arange(0, ROWS, gl.SliceLayout(1, C))
    columns_C = gl.arange(0, TOKENS, gl.SliceLayout(0, C))
    is_last = True
    if partial_ptr is not None:
        places_C = tile * splits * (ROWS * TOKENS) + rows_C[:, None] * TOKENS + columns_C[None, :]
        gl.store(partial_ptr + places_C + split * (ROWS * TOKENS), sum_C)
        # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
        _do("bar.sync 0; // $0")
        is_last = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            sum_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
            for other in range(splits):
                sum_C += gl.load(partial_ptr + places_C + other * (ROWS * TOKENS), cache_modifier=".cg")
            gl.store(arrived_ptr + tile, 0)
    if is_last:
        rows_C = tile * ROWS + rows_C
        tokens_C = gl.program_id(1) * TOKENS + columns_C
        if bias_ptr is not None:
            sum_C += gl.load(bias_ptr + gl.minimum(rows_C, num_rows - 1)).to(gl.float32)[:, None]
        out_C = out_ptr + tokens_C.to(gl.int64)[None, :] * num_rows + rows_C[:, None]
        gl.store(out_C, sum_C.to(gl.bfloat16), mask=(tokens_C < num_tokens)[None, :] & (rows_C < num_rows)[:, None])


@gluon.jit(do_not_specialize=["num_tiles"])
def multiply_packed_experts(
    x_ptr,
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    x_stride,
    CHOICES: gl.constexpr,
    IS_FIRST: gl.constexpr,
    OUT: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    MXFP4: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
    STAGED_X: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A tile of an expert's outputs, as `models.kernels.packed_experts` says of its kernel; the tokens' tiles of one
    block of weights lie next to each other."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, C, 8)
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    tile, block = gl.program_id(0) % num_tiles, gl.program_id(0) // num_tiles
    expert = gl.load(tiles_ptr + tile).to(gl.int64)
    if expert >= 0:
        first = tile
        stop = tile + 1
        if order_ptr is not None:
            first = gl.load(tiles_ptr + num_tiles + tile)
            stop = gl.load(tiles_ptr + 2 * num_tiles + tile)
        places_X = gl.minimum(first + gl.arange(0, TOKENS, gl.SliceLayout(0, X)), stop - 1)
        rows_X = places_X
        if IS_FIRST:
            if order_ptr is not None:
                rows_X = gl.load(order_ptr + places_X)
            rows_X = rows_X // CHOICES
        groups: gl.constexpr = COLUMNS // 32 if MXFP4 else (COLUMNS + GROUP - 1) // GROUP
        if zeros_ptr is not None:
            zeros_ptr += expert * (OUT * groups)
        sum_C = packed_sum(
            stored_ptr + expert * (OUT * (COLUMNS // 2)),
            scales_ptr + expert * (OUT * groups),
            zeros_ptr,
            x_ptr + rows_X.to(gl.int64) * x_stride,
            block * ROWS,
            OUT,
            0,
            COLUMNS // STEP,
            COLUMNS,
            GROUP,
            MXFP4,
            ROWS,
            TOKENS,
            STEP,
            AT_ONCE,
            STAGES,
            STAGED_X,
            False,
        )
        rows_C = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, C))
        places_C = first + gl.arange(0, TOKENS, gl.SliceLayout(0, C))
        exists_C = places_C < stop
        assignments_C = places_C
        if order_ptr is not None:
            assignments_C = gl.load(order_ptr + places_C, mask=exists_C, other=0)
        if bias_ptr is not None:
            sum_C += gl.load(bias_ptr + expert * OUT + gl.minimum(rows_C, OUT - 1)).to(gl.float32)[:, None]
        if weights_ptr is not None:
            sum_C *= gl.load(weights_ptr + assignments_C, mask=exists_C, other=0.0)[None, :]
        into_C = places_C if IS_FIRST else assignments_C
        out_C = out_ptr + into_C.to(gl.int64)[None, :] * OUT + rows_C[:, None]
        gl.store(out_C, sum_C.to(gl.bfloat16), mask=exists_C[None, :] & (rows_C < OUT)[:, None])
