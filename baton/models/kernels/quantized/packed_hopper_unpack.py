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
