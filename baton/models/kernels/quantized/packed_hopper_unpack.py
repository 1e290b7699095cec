"""Numbers of 4 bits as bfloat16 on Hopper, in Gluon: a thread unpacks four bytes at once, by instructions of its own.

Legend: `_A` is in the layout of the weight as an operand of a product.
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
