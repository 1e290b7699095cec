"""Products of few tokens with weights of 4 bits in strips on Hopper, bound by reading the weight: what launches
`baton.models.kernels.quantized.packed_hopper_few`.

Legend: T token, K input channel, N output channel.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from baton.models.formats.packed import STRIP, PackedWeight
from baton.tritonlib.launch import overlap


class FewTile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        strips: of 16 outputs, one for each warp; 4 or 8.
        at_once: steps whose weights are loaded together; 2 where these do not divide a program's steps.
        stages: turns of as many steps whose activations are in shared memory or in flight.
        programs_per_sm: programs that share tiles until each multiprocessor has as many.
        least_steps: of a program that shares a tile.
    """

    tokens: int
    strips: int = 4
    at_once: int = 2
    stages: int = 2
    programs_per_sm: int = 1
    least_steps: int = 4


# On an H200, the layers of Llama-3.1-8B with groups of 128 (bench/results/quantized.md). The first two are for weights
# of few outputs, whose tiles programs share. From 17 tokens on, `packed_tma` is faster there.
TILES = (
    FewTile(8, programs_per_sm=6),
    FewTile(16, at_once=4, programs_per_sm=4, least_steps=8),
    FewTile(8, at_once=4),
    FewTile(16),
    FewTile(32, strips=8),
    FewTile(64, strips=8, at_once=1, stages=3),
)
_OF_FEW_OUTPUTS, _OF_MANY_OUTPUTS = TILES[:2], TILES[2:]
_MANY_OUTPUTS = 128  # for each multiprocessor


def choose_tile(num_tokens: int, weight: PackedWeight, num_sms: int) -> FewTile | None:
    """The tile for this number of tokens; None where another kernel is as fast."""
    rows = weight.scales_GN.shape[1]
    tiles = _OF_MANY_OUTPUTS if rows >= _MANY_OUTPUTS * num_sms else _OF_FEW_OUTPUTS
    return next((tile for tile in tiles if num_tokens <= tile.tokens), None)


def multiply(
    x_TK: Tensor,
    weight: PackedWeight,
    bias_N: Tensor | None,
    *,
    step: int,
    arrived: Tensor,
    num_sms: int,
    tile: FewTile,
    splits: int | None = None,
) -> Tensor:
    """`x @ weight.T + bias`; takes what `packed_tma.multiply` takes. A step's sums are scaled in float32."""
    # NOTE: imported here because Gluon is experimental: with another Triton the import may fail.
    from baton.models.kernels.quantized.packed_hopper_few import multiply_few

    num_tokens, columns = x_TK.shape
    rows = weight.scales_GN.shape[1]
    out_TN = torch.empty(num_tokens, rows, dtype=x_TK.dtype, device=x_TK.device)
    if not num_tokens:
        return out_TN
    tiles, steps = triton.cdiv(rows, STRIP * tile.strips), columns // step
    if splits is None:
        splits = min(tile.programs_per_sm * num_sms // tiles, steps // tile.least_steps)
    splits = max(1, min(splits, steps))
    at_once = tile.at_once if steps % (splits * tile.at_once) == 0 else 2
    partial = None
    if splits > 1:
        shape = tiles * splits, STRIP * tile.strips, tile.tokens
        partial = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
    multiply_few[(tiles * splits,)](
        x_TK,
        weight.stored_NB.view(torch.int32),
        weight.scales_GN,
        None if weight.zeros_GN is None else weight.zeros_GN.view(torch.uint16),
        bias_N,
        out_TN,
        partial,
        arrived,
        num_tokens,
        rows,
        x_TK.stride(0),
        splits,
        COLUMNS=columns,
        GROUP=weight.group_size,
        STEP=step,
        TOKENS=tile.tokens,
        STRIPS=tile.strips,
        AT_ONCE=at_once,
        STAGES=tile.stages,
        **overlap(x_TK.device, rows=num_tokens),
        num_warps=tile.strips,
    )
    return out_TN
