"""Numbers of 4 bits as bfloat16 on Hopper, in Gluon: a thread unpacks four bytes at once, by instructions of its own.

Legend: `_A` is in the layout of the weight as an operand of a product; R rows, G groups of inputs with one scale, B
bytes of packed numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
def pairs_less_zeros(pairs_W, zeros_W):
    """Numbers less zeros, which are 128 more than they are, of two pairs of bytes at once; bfloat16, exact.

    Returns (low halves of the first pair, those of the second pair, high halves of the first, of the second): where two
    pairs were, there are the two numbers of one.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 bytes, rest;
        prmt.b32 bytes, $4, 0, 0x3120;
        lop3.b32 $0, bytes, 0x000f000f, 0x43004300, 0xea;
        shr.u32 rest, bytes, 4;
        lop3.b32 $2, rest, 0x000f000f, 0x43004300, 0xea;
        shr.u32 rest, bytes, 8;
        lop3.b32 $1, rest, 0x000f000f, 0x43004300, 0xea;
        shr.u32 rest, bytes, 12;
        lop3.b32 $3, rest, 0x000f000f, 0x43004300, 0xea;
        sub.rn.bf16x2 $0, $0, $5;
        sub.rn.bf16x2 $1, $1, $5;
        sub.rn.bf16x2 $2, $2, $5;
        sub.rn.bf16x2 $3, $3, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [pairs_W, zeros_W],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def scaled_pairs_less_zeros(pairs_W, zeros_W, scales_W):
    """`pairs_less_zeros` times scales, rounded."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 bytes, rest;
        prmt.b32 bytes, $4, 0, 0x3120;
        lop3.b32 $0, bytes, 0x000f000f, 0x43004300, 0xea;
        shr.u32 rest, bytes, 4;
        lop3.b32 $2, rest, 0x000f000f, 0x43004300, 0xea;
        shr.u32 rest, bytes, 8;
        lop3.b32 $1, rest, 0x000f000f, 0x43004300, 0xea;
        shr.u32 rest, bytes, 12;
        lop3.b32 $3, rest, 0x000f000f, 0x43004300, 0xea;
        sub.rn.bf16x2 $0, $0, $5;
        sub.rn.bf16x2 $1, $1, $5;
        sub.rn.bf16x2 $2, $2, $5;
        sub.rn.bf16x2 $3, $3, $5;
        mul.rn.bf16x2 $0, $0, $6;
        mul.rn.bf16x2 $1, $1, $6;
        mul.rn.bf16x2 $2, $2, $6;
        mul.rn.bf16x2 $3, $3, $6;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [pairs_W, zeros_W, scales_W],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
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
def mxfp4_exponents(
    scales_ptr, row, num_rows, first_group, GROUPS: gl.constexpr, ROWS: gl.constexpr, BYTES: gl.constexpr
):
    """Returns int32 [ROWS, eights of bytes], the exponent of each eight's group; a row has GROUPS groups."""
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


@gluon.constexpr_function
def _eights(rows: int, num_bytes: int) -> gl.DistributedLinearLayout:
    """Returns the weight's layout with each row's bytes split into eights; one thread has a whole eight."""
    of_registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]]
    if num_bytes == 64:
        of_registers.append([0, 4, 0])
    if rows == 128:
        of_registers.append([64, 0, 0])
    of_lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    of_warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(of_registers, of_lanes, of_warps, [], [rows, num_bytes // 8, 8])
