"""The sum of the Hopper kernel of experts with weights of 4 bits: a tile of outputs, step after step of inputs.

Stages of weights are copied to shared memory ahead of their use. From there each thread loads the bytes of just those
numbers that it multiplies, and unpacks four of them at once. The low and the high halves of a tile's bytes are the
channels of two products (`baton.models.formats.packed`), and a byte's place is the same in both.

Gluon's tuples grow by addition alone. Legend: N output channel, T token, B byte of packed numbers; `_A`, `_X` and `_C`
are in the layouts of the weight, the activations and the result.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

RUN = gl.constexpr(16)  # that of `baton.models.formats.packed`


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
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Returns float32 [ROWS, TOKENS], `_C`: the products over steps [first, stop) of the rows from `row` on. Rows past
    the end repeat the last row.

    Args:
        x_rows_X: where each token's activations begin.
        GROUP: inputs with one scale, a multiple of STEP.
        STEP: inputs of one step, a divisor of COLUMNS.
        AT_ONCE: steps of a stage.
        STAGES: stages whose weights are in shared memory or in flight.
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
        async_copy.commit_group()
    x = x_rows_X[None, :] + inputs_of_halves(BYTES, gl.SliceLayout(1, X))[:, None]
    sum_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    nothing_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    # A step's scales and zeros are loaded one turn before.
    scales = load_scales(scales_ptr, row, num_rows, first, stop, GROUP, ROWS, STEP, AT_ONCE)
    zeros = load_zeros(zeros_ptr, row, num_rows, first, stop, GROUP, ROWS, STEP, AT_ONCE)
    for some in range(first, stop, AT_ONCE):
        turn = (some - first) // AT_ONCE
        low, high = (), ()
        for one in gl.static_range(AT_ONCE):
            start = gl.minimum(some + one, stop - 1) * STEP
            low = low + (gl.load(x + start),)
            high = high + (gl.load(x + (start + RUN)),)
        async_copy.wait_group(STAGES - 2)
        stored_bytes = ()
        for one in gl.static_range(AT_ONCE):
            place = turn % STAGES * AT_ONCE + one
            stored_bytes = stored_bytes + (stages.index(place).load(A),)
        ahead = STAGES - 1
        copy_weights(stages, stored, (turn + ahead) % STAGES, some + ahead * AT_ONCE, stop, BYTES, AT_ONCE)
        async_copy.commit_group()
        for one in gl.static_range(AT_ONCE):
            exists = some + one < stop
            if zeros_ptr is not None:
                halves_A = (zeros[one] + 128.0).to(gl.bfloat16)
                less_A = gl.zeros([ROWS, BYTES], gl.bfloat16, A) + halves_A[:, None]
            else:
                less_A = gl.full([ROWS, BYTES], 136.0, gl.bfloat16, A)
            low_A, high_A = _less_zeros(stored_bytes[one], less_A)
            product_C = mma_v2(low_A, low[one], nothing_C)
            product_C = mma_v2(high_A, high[one], product_C)
            sum_C += product_C * gl.where(exists, scales[one], 0.0)[:, None]
        following = some + AT_ONCE
        scales = load_scales(scales_ptr, row, num_rows, following, stop, GROUP, ROWS, STEP, AT_ONCE)
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
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Loads the scales of each step of a turn, float32 [ROWS]."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    rows_C = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, C)), num_rows - 1)
    scales = ()
    for one in gl.static_range(AT_ONCE):
        start = gl.minimum(step + one, stop - 1) * STEP
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
    """Loads the zeros of each step of a turn, float32 [ROWS]; an empty tuple if there are none."""
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
    """Starts copying the weights of a stage; past the last step it repeats that step's."""
    for one in gl.static_range(AT_ONCE):
        async_copy.async_copy_global_to_shared(
            stages.index(stage * AT_ONCE + one), stored + gl.minimum(step + one, stop - 1) * BYTES
        )


@gluon.jit
def _less_zeros(bytes_A, zeros_A):
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
