"""Products of experts with weights in mxfp4 on Hopper, in Gluon: each thread loads the numbers that it multiplies
straight into registers, some steps ahead, from the form of `baton.models.formats.mxfp4_tiles`, whose letters the
layouts here use.

Legend: `_W` words of a tile, `_S` of its scales, `_C` the result's layout, `_T` tokens.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr,var-annotated"
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from baton.tritonlib.gluon_launch import await_predecessors, start_dependents

TILE = gl.constexpr(64)
WORDS = gl.constexpr(512)  # of a tile's numbers
SCALES = gl.constexpr(32)  # words of a tile's scales


@gluon.constexpr_function
def _of_words(groups: int) -> gl.DistributedLinearLayout:
    of_warps = [[0, 128], [0, 256], [1, 0], [2, 0]][: {1: 2, 2: 3, 4: 4}[groups]]
    of_lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], of_lanes, of_warps, [], [groups, 512])


@gluon.constexpr_function
def _of_scales(groups: int) -> gl.DistributedLinearLayout:
    """[words of scales, 4], the word of each thread's rows."""
    of_warps = [[8, 0], [16, 0], [32, 0], [64, 0]][: {1: 2, 2: 3, 4: 4}[groups]]
    return gl.DistributedLinearLayout([], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], of_warps, [], [groups * 32, 4])


@gluon.constexpr_function
def _of_result(groups: int, tokens: int, by_warpgroup: bool) -> gl.NVMMADistributedLayout:
    if by_warpgroup:
        return gl.NVMMADistributedLayout([3, 0], [4 * groups, 1], [16, tokens, 16])
    return gl.NVMMADistributedLayout([2, 0], [4 * groups, 1], [16, 8])


@gluon.jit
def _factors(scales_S, GROUPS: gl.constexpr):
    """int32 [GROUPS, WORDS]: the factors of a word's two rows, in bfloat16; `scales_S` has their exponents."""
    first_S, second_S = gl.inline_asm_elementwise(
        """{
        prmt.b32 $0, $2, 0, 0x4140;
        prmt.b32 $1, $2, 0, 0x4342;
        shl.b32 $0, $0, 7;
        shl.b32 $1, $1, 7;
        }""",
        "=&r,=&r,r",
        [scales_S],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    first = gl.expand_dims(first_S, 1).broadcast_to([GROUPS * SCALES, 4])
    second = gl.expand_dims(second_S, 1).broadcast_to([GROUPS * SCALES, 4])
    of_halves = gl.join(first, second)
    of_words = gl.join(of_halves, of_halves)
    return gl.convert_layout(of_words.reshape([GROUPS, WORDS]), _of_words(GROUPS))


@gluon.jit
def _unpacked(words_W, factors_W, GROUPS: gl.constexpr, A: gl.constexpr):
    """bfloat16 [GROUPS * TILE, TILE]: numbers times factors, exact.

    The bits of a float of 4 bits, put at the end of bfloat16's exponent and the beginning of its fraction, are the
    float times 2 ** -126, also where it is below 1. The tensor cores want two numbers of a word in one register, so the
    results' names differ from their contents: what is called a number of two words is a pair of one word.
    """
    a00, a01, a10, a11, b00, b01, b10, b11 = gl.inline_asm_elementwise(
        """{
        .reg .b32 other, rest, first, second;
        .reg .b16 low, high;
        mov.b32 {low, high}, $10;
        mov.b32 first, {low, low};
        mov.b32 second, {high, high};
        and.b32 $0, $8, 0x81c081c0;
        shl.b32 other, $8, 3;
        and.b32 $1, other, 0x81c081c0;
        shl.b32 other, $8, 6;
        and.b32 $2, other, 0x81c081c0;
        shl.b32 other, $8, 1;
        and.b32 $3, other, 0x80008000;
        shr.u32 other, $8, 3;
        lop3.b32 rest, other, 0x01800180, $3, 0xea;
        shr.u32 other, $8, 7;
        lop3.b32 $3, other, 0x00400040, rest, 0xea;
        mul.rn.bf16x2 $0, $0, first;
        mul.rn.bf16x2 $1, $1, second;
        mul.rn.bf16x2 $2, $2, first;
        mul.rn.bf16x2 $3, $3, second;
        and.b32 $4, $9, 0x81c081c0;
        shl.b32 other, $9, 3;
        and.b32 $5, other, 0x81c081c0;
        shl.b32 other, $9, 6;
        and.b32 $6, other, 0x81c081c0;
        shl.b32 other, $9, 1;
        and.b32 $7, other, 0x80008000;
        shr.u32 other, $9, 3;
        lop3.b32 rest, other, 0x01800180, $7, 0xea;
        shr.u32 other, $9, 7;
        lop3.b32 $7, other, 0x00400040, rest, 0xea;
        mul.rn.bf16x2 $4, $4, first;
        mul.rn.bf16x2 $5, $5, second;
        mul.rn.bf16x2 $6, $6, first;
        mul.rn.bf16x2 $7, $7, second;
        // $11 is $10
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words_W, factors_W],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    first_half = gl.join(gl.join(a00, b00), gl.join(a01, b01))
    second_half = gl.join(gl.join(a10, b10), gl.join(a11, b11))
    # [wg, w, g, t, q, p, one of the two words, r, h] to [wg, w, r, g, q, the same, h, t, p]
    numbers = gl.join(first_half, second_half).reshape([GROUPS, 4, 8, 4, 2, 2, 2, 2, 2])
    numbers = numbers.permute((0, 1, 7, 2, 4, 6, 8, 3, 5)).reshape([GROUPS * TILE, TILE])
    return gl.convert_layout(numbers, A)


@gluon.jit
def _load(stored_W, scales_S, step, AT_ONCE: gl.constexpr):
    """Loads the words and the scales of AT_ONCE steps."""
    stored, scales = (), ()
    for one in gl.static_range(AT_ONCE):
        stored = stored + (gl.load(stored_W + (step + one) * WORDS),)
        scales = scales + (gl.load(scales_S + (step + one) * SCALES),)
    return stored, scales


@gluon.jit
def _copy_x(inputs, x, exists, stage, step, AT_ONCE: gl.constexpr):
    for one in gl.static_range(AT_ONCE):
        async_copy.async_copy_global_to_shared(inputs[one].index(stage), x + (step + one) * TILE, mask=exists)


@gluon.jit
def _sum_of_steps(
    stored_ptr,
    scales_ptr,
    x,
    exists,
    first_tile,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    GROUPS: gl.constexpr,
    TOKENS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
    EARLY: gl.constexpr,
    C: gl.constexpr,
):
    """float32 [GROUPS * TILE, TOKENS], `_C`: the product with the rows of the tiles from `first_tile` on, each eight
    pairs of rows of a warp with the first of each pair before the second. Tiles past the end repeat the last."""
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    W: gl.constexpr = _of_words(GROUPS)
    S: gl.constexpr = gl.SliceLayout(1, _of_scales(GROUPS))
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles_W = gl.minimum(first_tile + gl.arange(0, GROUPS, gl.SliceLayout(1, W)), TILES - 1)
    stored_W = stored_ptr + (tiles_W * (STEPS * WORDS))[:, None] + gl.arange(0, WORDS, gl.SliceLayout(0, W))[None, :]
    numbers_S = gl.arange(0, GROUPS * SCALES, S)
    tiles_S = gl.minimum(first_tile + numbers_S // SCALES, TILES - 1)
    scales_S = scales_ptr + tiles_S * (STEPS * SCALES) + numbers_S % SCALES
    # Each step of a stage has an allocation of its own, because the compiler puts a barrier between copies to one.
    inputs = ()
    for _ in gl.static_range(AT_ONCE):
        inputs = inputs + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, TILE], SHARED),)
    stored, scales = _load(stored_W, scales_S, 0, AT_ONCE)
    await_predecessors(EARLY)
    for stage in gl.static_range(STAGES - 1):
        _copy_x(inputs, x, exists, stage, gl.minimum(stage * AT_ONCE, STEPS - AT_ONCE), AT_ONCE)
        async_copy.commit_group()
    sum_C = gl.zeros([GROUPS * TILE, TOKENS], gl.float32, C)
    for step in range(0, STEPS, AT_ONCE):
        turn = step // AT_ONCE
        next_stored, next_scales = _load(stored_W, scales_S, gl.minimum(step + AT_ONCE, STEPS - AT_ONCE), AT_ONCE)
        async_copy.wait_group(STAGES - 2)
        ahead = gl.minimum(step + (STAGES - 1) * AT_ONCE, STEPS - AT_ONCE)
        _copy_x(inputs, x, exists, (turn + STAGES - 1) % STAGES, ahead, AT_ONCE)
        async_copy.commit_group()
        if WGMMA:
            fence_async_shared()
        for one in gl.static_range(AT_ONCE):
            numbers = _unpacked(stored[one], _factors(scales[one], GROUPS), GROUPS, A)
            x_KT = inputs[one].index(turn % STAGES).permute((1, 0))
            if WGMMA:
                sum_C = warpgroup_mma(numbers, x_KT, sum_C)
            else:
                sum_C = mma_v2(numbers, x_KT.load(gl.DotOperandLayout(1, C, 2)), sum_C)
        stored, scales = next_stored, next_scales
    async_copy.wait_group(0)
    return sum_C


@gluon.jit(do_not_specialize=["num_tiles"])
def multiply_mxfp4_experts(
    x_ptr,
    stored_ptr,
    scales_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    x_stride,
    limit,
    alpha,
    CHOICES: gl.constexpr,
    IS_FIRST: gl.constexpr,
    OUT: gl.constexpr,
    COLUMNS: gl.constexpr,
    GATED: gl.constexpr,
    GROUPS: gl.constexpr,
    TOKENS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes GROUPS * TILE outputs of an expert for a tile of the order, as the kernels in
    `baton.models.kernels.quantized.packed_experts` do; with GATED, half as many after `clamp_and_gate`."""
    ROWS: gl.constexpr = GROUPS * TILE
    C: gl.constexpr = _of_result(GROUPS, TOKENS, WGMMA)
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    # The second product loads its first weights while the first one runs: the order was complete before any program of
    # the first one let it start. It reads the order from L2, because L1 may have an earlier one.
    EARLY: gl.constexpr = OVERLAP and not IS_FIRST
    if not EARLY:
        await_predecessors(OVERLAP)
    start_dependents(OVERLAP)
    tile, block = gl.program_id(0) % num_tiles, gl.program_id(0) // num_tiles
    expert = gl.load(tiles_ptr + tile, cache_modifier=".cg").to(gl.int64)
    if expert < 0:
        await_predecessors(EARLY)
    else:
        first = tile
        stop = tile + 1
        if order_ptr is not None:
            first = gl.load(tiles_ptr + num_tiles + tile, cache_modifier=".cg")
            stop = gl.load(tiles_ptr + 2 * num_tiles + tile, cache_modifier=".cg")
        places_T = first + gl.arange(0, TOKENS, gl.SliceLayout(1, COPY_X))
        exists_T = places_T < stop
        rows_T = places_T
        if IS_FIRST:
            if order_ptr is not None:
                rows_T = gl.load(order_ptr + places_T, mask=exists_T, other=0)
            rows_T = rows_T // CHOICES
        x = x_ptr + (rows_T.to(gl.int64) * x_stride)[:, None] + gl.arange(0, TILE, gl.SliceLayout(0, COPY_X))[None, :]
        sum_C = _sum_of_steps(
            stored_ptr + expert * (OUT * COLUMNS // 8),
            scales_ptr + expert * (OUT * COLUMNS // 128),
            x,
            exists_T[:, None],
            block * GROUPS,
            OUT // TILE,
            COLUMNS // TILE,
            GROUPS,
            TOKENS,
            AT_ONCE,
            STAGES,
            WGMMA,
            EARLY,
            C,
        )
        numbers_C = gl.arange(0, ROWS, gl.SliceLayout(1, C))
        rows_C = block * ROWS + (numbers_C // 16 * 16 + numbers_C % 8 * 2 + numbers_C // 8 % 2)
        if bias_ptr is not None:
            sum_C += gl.load(bias_ptr + expert * OUT + gl.minimum(rows_C, OUT - 1)).to(gl.float32)[:, None]
        if weights_ptr is not None:
            places_C = first + gl.arange(0, TOKENS, gl.SliceLayout(0, C))
            exists_C = places_C < stop
            assignments_C = places_C
            if order_ptr is not None:
                assignments_C = gl.load(order_ptr + places_C, mask=exists_C, other=0)
            sum_C *= gl.load(weights_ptr + assignments_C, mask=exists_C, other=0.0)[None, :]
        in_pairs = sum_C.reshape([ROWS // 16, 2, 8, TOKENS])
        OUTPUTS: gl.constexpr = ROWS // 2 if GATED else ROWS
        ALL: gl.constexpr = OUT // 2 if GATED else OUT
        if GATED:
            gate, up = gl.split(in_pairs.permute((0, 2, 3, 1)).to(gl.bfloat16).to(gl.float32))
            gate = gl.minimum(gate, limit)
            up = gl.minimum(gl.maximum(up, -limit), limit)
            result = (gate / (1.0 + gl.exp(-alpha * gate)) * (up + 1.0)).reshape([OUTPUTS, TOKENS])
        else:
            result = in_pairs.permute((0, 2, 1, 3)).reshape([OUTPUTS, TOKENS])
        LANES: gl.constexpr = OUTPUTS // 8 // GROUPS
        OF: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [GROUPS, 4], [0, 1])
        result = gl.convert_layout(result.to(gl.bfloat16), OF)
        outputs = block * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, OF))
        places = first + gl.arange(0, TOKENS, gl.SliceLayout(0, OF))
        exists = places < stop
        into = places
        if not IS_FIRST and order_ptr is not None:
            into = gl.load(order_ptr + places, mask=exists, other=0)
        out = out_ptr + into.to(gl.int64)[None, :] * ALL + outputs[:, None]
        gl.store(out, result, mask=exists[None, :] & (outputs < ALL)[:, None])
