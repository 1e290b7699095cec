"""Weights of 4 bits in strips (`baton.models.formats.packed`) on Hopper, in Gluon: four strips for each warpgroup
become the operand of a product. Each thread has the words that hold the numbers it multiplies, so nothing moves between
threads.

Legend: `_W` [strips, words], `_P` [strips, 8], pairs of outputs. The tensor cores want the first output of every pair
of a strip before the second ones, so a result's rows are in that order.
"""

# mypy: disable-error-code="attr-defined,union-attr"

from __future__ import annotations

from itertools import product

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.models.formats.packed import STRIP, STRIP_INPUTS

STRIP_ROWS, STEP_INPUTS = gl.constexpr(STRIP), gl.constexpr(STRIP_INPUTS)
WORDS = gl.constexpr(STRIP * STRIP_INPUTS // 8)  # of a strip, for these inputs
# A product with `as_operand` is this many times smaller than with the numbers.
LESS = gl.constexpr(64.0)


def _unpacking(*, scaled: bool) -> str:
    """Instructions that unpack two words, $8 and $9, to $0 to $7. Both words have the zeros $10 and the scales $12,
    because they have the same pair of outputs.

    A number's bits at the end of a bfloat16 are the number times 2 ** -133, and four places higher the number times
    2 ** -129. Multiplied by 2 ** 127 and by 2 ** 123 they are a 64th of the number.
    """
    lines = [".reg .b32 rest, zero0, zero1, scale0, scale1, power0, power1, power_of_zeros;"]
    lines += ["mov.b32 power0, 0x7f007f00;", "mov.b32 power1, 0x7d007d00;", "mov.b32 power_of_zeros, 0xff00ff00;"]
    for row in range(2):
        lines += [
            f"prmt.b32 zero{row}, $10, 0, 0x4{row}4{row};",
            f"mul.rn.bf16x2 zero{row}, zero{row}, power_of_zeros;",
        ]
    lines += [f"prmt.b32 scale{row}, $12, 0, {places};" for row, places in enumerate(("0x1010", "0x3232")) if scaled]
    for word, half in product(range(2), range(2)):
        source = "rest" if half else f"${8 + word}"
        lines += [f"shr.u32 rest, ${8 + word}, 8;"] if half else []
        for row, mask in enumerate(("0x000f000f", "0x00f000f0")):
            out = f"${4 * word + 2 * half + row}"
            lines.append(f"and.b32 {out}, {source}, {mask};")
            lines.append(f"fma.rn.bf16x2 {out}, {out}, power{row}, zero{row};")
            lines += [f"mul.rn.bf16x2 {out}, {out}, scale{row};"] if scaled else []
    return "\n".join(["{", *lines, "// $11 and $13 are $10 and $12" if scaled else "// $11 is $10", "}"])


_LESS_ZEROS = gl.constexpr(_unpacking(scaled=False))
_SCALED_LESS_ZEROS = gl.constexpr(_unpacking(scaled=True))


@gluon.constexpr_function
def _of_warps(strips: int, rank: int) -> list[list[int]]:
    return [[1 << bit, *[0] * (rank - 1)] for bit in range(strips.bit_length() - 1)]


@gluon.constexpr_function
def words_layout(strips: int, loads: int) -> gl.DistributedLinearLayout:
    """Of [strips, WORDS * loads]."""
    of_registers = [[0, 1], [0, 2]] + ([[0, 128]] if loads == 2 else [])
    of_lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    return gl.DistributedLinearLayout(of_registers, of_lanes, _of_warps(strips, 2), [], [strips, 128 * loads])


@gluon.constexpr_function
def rows_layout(strips: int) -> gl.DistributedLinearLayout:
    """Of [strips, 8, 2]: pairs and outputs of a pair."""
    of_lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1]], of_lanes, _of_warps(strips, 3), [], [strips, 8, 2])


@gluon.constexpr_function
def _spread_layout(strips: int, loads: int) -> gl.DistributedLinearLayout:
    """Of [strips, 8, loads, 4, 4]: pairs, and the words of a pair."""
    of_registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]] + ([[0, 0, 1, 0, 0]] if loads == 2 else [])
    of_lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    return gl.DistributedLinearLayout(of_registers, of_lanes, _of_warps(strips, 5), [], [strips, 8, loads, 4, 4])


@gluon.constexpr_function
def pairs_layout(strips: int, loads: int) -> gl.SliceLayout:
    return gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, _spread_layout(strips, loads))))


@gluon.jit
def of_words(pairs_P, STRIPS: gl.constexpr, LOADS: gl.constexpr):
    """Gives every word the number of its pair."""
    spread = pairs_P[:, :, None, None, None].broadcast_to([STRIPS, 8, LOADS, 4, 4])
    in_order = spread.permute((0, 2, 1, 3, 4)).reshape([STRIPS, WORDS * LOADS])
    return gl.convert_layout(in_order, words_layout(STRIPS, LOADS))


@gluon.jit
def of_rows(scales, C: gl.constexpr):
    """float32, in the order of a result's rows, of [strips, 8, 2]."""
    in_order = scales.to(gl.float32).permute((0, 2, 1)).reshape([scales.shape[0] * STRIP_ROWS])
    return gl.convert_layout(in_order, gl.SliceLayout(1, C))


@gluon.jit
def output_of(rows):
    """The output of a result's row."""
    return rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2


@gluon.jit
def as_operand(words_W, zeros_P, scales_P, STRIPS: gl.constexpr, LOADS: gl.constexpr, C: gl.constexpr):
    """bfloat16 [16 STRIPS, STEP_INPUTS * LOADS]: numbers less their zeros over LESS, exact; with `scales_P` times their
    scales, rounded.

    What the unpacking calls a number of two words is a pair of one word's numbers, because the tensor cores want
    these in one register.

    Args:
        zeros_P: a pair's zeros in two bytes; None: 8.
        scales_P: int32, a pair's scales in bfloat16; None: no scales.
        C: the layout of the result.
    """
    if zeros_P is None:
        zeros_W = gl.full([STRIPS, WORDS * LOADS], 0x0808, gl.int32, words_layout(STRIPS, LOADS))
    else:
        zeros_W = of_words(zeros_P.to(gl.int32), STRIPS, LOADS)
    if scales_P is None:
        a00, a01, a10, a11, b00, b01, b10, b11 = _less_zeros(words_W, zeros_W)
    else:
        scales_W = of_words(scales_P, STRIPS, LOADS)
        a00, a01, a10, a11, b00, b01, b10, b11 = _scaled_less_zeros(words_W, zeros_W, scales_W)
    first_half = gl.join(gl.join(a00, b00), gl.join(a01, b01))
    second_half = gl.join(gl.join(a10, b10), gl.join(a11, b11))
    # From [strip, load, g, t, half of j, p, j, r, h] to [strip, r, g, load, half of j, j, h, t, p].
    numbers = gl.join(first_half, second_half).reshape([STRIPS, LOADS, 8, 4, 2, 2, 2, 2, 2])
    numbers = numbers.permute((0, 7, 2, 1, 4, 6, 8, 3, 5)).reshape([STRIPS * STRIP_ROWS, STEP_INPUTS * LOADS])
    return gl.convert_layout(numbers, gl.DotOperandLayout(0, C, 2))


@gluon.jit
def _less_zeros(words_W, zeros_W):
    return gl.inline_asm_elementwise(
        _LESS_ZEROS,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words_W, zeros_W],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _scaled_less_zeros(words_W, zeros_W, scales_W):
    return gl.inline_asm_elementwise(
        _SCALED_LESS_ZEROS,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [words_W, zeros_W, scales_W],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def in_bfloat16(scales_P):
    """int32 pairs of float16 as pairs of bfloat16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .f32 first, second;
        mov.b32 {low, high}, $1;
        cvt.f32.f16 first, low;
        cvt.f32.f16 second, high;
        cvt.rn.bf16x2.f32 $0, second, first;
        }""",
        "=r,r",
        [scales_P],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
