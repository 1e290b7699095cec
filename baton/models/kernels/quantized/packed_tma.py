"""Products with weights of 4 bits on Hopper whose operands the copy engine (TMA) brings to shared memory: what launches
`baton.models.kernels.quantized.packed_hopper_tma`.

Legend: T token, K input channel, N output channel.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from baton.models.formats.packed import STRIP, PackedWeight
from baton.tritonlib.launch import overlap

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MOST_TOKENS = 1024  # the library multiplies more
# Rows of a tile, and steps whose scales are copied at once.
_ROWS, _BLOCK = 128, 4
_LEAST_STEPS = 4  # of a program that shares a tile
_ALIGNMENT = 16  # bytes


class PackedTile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        stages: steps that are in shared memory or in flight.
        scaled: numbers are scaled in bfloat16 before they are multiplied; else a step's sums are, in float32. It leaves
            registers for sums of more tokens.
        registers: of a thread that multiplies.
        launched: registers of each thread when a program starts, which its warps then redistribute.
    """

    tokens: int
    stages: int
    scaled: bool = False
    registers: int = 152
    launched: int = 112


TILES = (
    PackedTile(32, stages=8),
    PackedTile(64, stages=6, registers=232, launched=168),
    PackedTile(128, stages=5, scaled=True, registers=232, launched=168),
)

# Of products whose bits do not depend on the number of tokens.
TILE_OF_ANY = TILES[1]


def choose_tile(num_tokens: int) -> PackedTile:
    """The tile for this number of tokens."""
    return next((tile for tile in TILES if num_tokens <= tile.tokens), TILES[-1])


def can_be_copied(x_TK: Tensor) -> bool:
    """Whether the copy engine can read activations: rows begin at multiples of 16 bytes."""
    return x_TK.stride(0) * x_TK.element_size() % _ALIGNMENT == 0 and x_TK.data_ptr() % _ALIGNMENT == 0


def multiply(
    x_TK: Tensor,
    weight: PackedWeight,
    bias_N: Tensor | None,
    *,
    step: int,
    arrived: Tensor,
    num_sms: int,
    tile: PackedTile | None = None,
    splits: int | None = None,
) -> Tensor:
    """`x @ weight.T + bias`. Sums are in float32 and rounded once; a `scaled` tile rounds numbers before.

    Args:
        x_TK: bfloat16 that `can_be_copied`, inputs in the weight's order; a row's are next to each other.
        weight: in strips.
        step: inputs of one step, 64 or 128, which have one scale; a divisor of K.
        arrived: int32 zeros, which the launch leaves, for halves of tiles that programs share.
        tile, splits: programs that share a tile; None: chosen by the shapes. Tests pass others.
    """
    # NOTE: imported here because Gluon is experimental: with another Triton the import may fail.
    from baton.models.kernels.quantized.packed_hopper_tma import WARPS, multiply_by_copies

    num_tokens, rows = x_TK.shape[0], weight.stored_NB.shape[0]
    out_TN = torch.empty(num_tokens, rows, dtype=x_TK.dtype, device=x_TK.device)
    if not num_tokens:
        return out_TN
    tile = choose_tile(num_tokens) if tile is None else tile
    token_tiles = triton.cdiv(num_tokens, tile.tokens)
    tiles, steps = triton.cdiv(rows, _ROWS) * token_tiles, weight.columns // step
    if splits is None:
        splits = min(num_sms // tiles, steps // _LEAST_STEPS)
    splits = 1 if 2 * tiles > len(arrived) else max(1, min(splits, steps))
    partial = None
    if splits > 1:
        partial = torch.empty(tiles * splits, _ROWS, tile.tokens, dtype=torch.float32, device=x_TK.device)
    multiply_by_copies[(tiles * splits,)](
        *_descriptors(x_TK, weight, tile.tokens, step),
        bias_N,
        out_TN,
        partial,
        arrived,
        num_tokens,
        rows,
        weight.columns,
        token_tiles,
        splits,
        GROUP=weight.group_size,
        STAGES=tile.stages,
        SCALED=tile.scaled,
        REGISTERS=tile.registers,
        **overlap(x_TK.device, rows=num_tokens),
        num_warps=WARPS,
        maxnreg=tile.launched,
    )
    return out_TN


def _descriptors(
    x_TK: Tensor, weight: PackedWeight, tokens: int, step: int
) -> "tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor, TensorDescriptor | None]":
    """The kernel's `Operands`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def in_boxes(matrix: Tensor, rows: int, columns: int, *, swizzle: int = 0) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(swizzle, 8 * matrix.element_size(), 2)
        return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)

    strips, zeros = weight.stored_NB.view(torch.int32).view(-1, 2 * weight.columns), weight.zeros_GN
    return (
        in_boxes(x_TK, tokens, step, swizzle=128),
        in_boxes(strips, _ROWS // STRIP, 2 * step),
        in_boxes(weight.scales_GN, _BLOCK, _ROWS),
        None if zeros is None else in_boxes(zeros, _BLOCK, _ROWS),
    )
