"""A layer's experts in mxfp4 on Hopper, whose weights are in the form of `baton.models.formats.mxfp4_tiles`: two
products over the rows of all experts, which read the order of `expert_order`. The first ends with the activation. The
host never waits.

Legend: T token, D channel, K choice of a token, R row of some expert, E expert, N output channel, I channel between.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from baton.models.formats.mxfp4_tiles import SCALES_MAX, TILE
from baton.models.kernels.moe.expert_order import ExpertOrder, order_by_expert
from baton.models.kernels.quantized.packed_experts import Mxfp4Weight, sum_experts
from baton.models.kernels.quantized.packed_tiles import can_be_staged
from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of
from baton.tritonlib.launch import overlap


class Mxfp4Tile(NamedTuple):
    """The part of a product that one program computes.

    Attributes:
        tokens: of one expert.
        row_tiles: of 64 outputs, one for each four warps.
        at_once: steps of 64 inputs whose weights are loaded together, or fewer, so that they divide all steps.
        stages: of as many steps, whose activations are in shared memory or in flight.
        by_warpgroup: four warps multiply together, or each warp alone.
    """

    tokens: int
    row_tiles: int = 1
    at_once: int = 5
    stages: int = 2
    by_warpgroup: bool = True


# By the mean number of tokens of an expert. On an H200, a layer's experts of gpt-oss-20b from their order to their sum,
# with 4 of 32 experts a token: 1 token 29 us, 8 tokens 91, 32 tokens 131, 128 tokens 170, 256 tokens 230
# (bench/results/quantized.md).
_TILES = {
    1 / 8: Mxfp4Tile(8, at_once=9),
    4: Mxfp4Tile(8, by_warpgroup=False),
    8: Mxfp4Tile(16),
    16: Mxfp4Tile(32),
}
_LARGEST_TILE = Mxfp4Tile(64, row_tiles=2, at_once=3, stages=3)
_TILE_OF_ANY = Mxfp4Tile(32)


class ClampedGate(NamedTuple):
    """The options of `baton.models.kernels.activation.clamp_and_gate`."""

    limit: float
    alpha: float


def reads_tiles(weight: Mxfp4Weight, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies activations of this dtype by the weight, once it is in tiles."""
    if dtype != torch.bfloat16 or weight.stored_ENB.shape[1] % TILE or weight.columns % TILE:
        return False
    device = weight.stored_ENB.device
    return has_hopper_kernels(device, _HOPPER) and not bool((weight.scales_ENG > SCALES_MAX).any())


_HOPPER = HopperKernels(
    "experts in mxfp4",
    probe_of("baton.models.kernels.quantized.packed_probe", "compare_tiled_experts_on_hopper"),
)


def run_tiled_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: Mxfp4Weight,
    down: Mxfp4Weight,
    gate: ClampedGate,
    *,
    gate_up_bias_EN: Tensor,
    down_bias_EN: Tensor,
    batch_invariant: bool = False,
    of: int | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts.

    Args:
        x_TD: channels contiguous.
        weights_TK: float32.
        gate_up: gates at even channels and ups at odd ones.
        batch_invariant: one shape of tiles for every number of tokens.
        of: as in `run_gated_experts`.
    """
    num_tokens, choices = experts_TK.shape
    if not num_tokens:
        return torch.empty_like(x_TD)
    num_experts = len(down_bias_EN)
    tile = _TILE_OF_ANY if batch_invariant else _tile_of(num_tokens * choices / (num_experts if of is None else of))
    order = order_by_expert(experts_TK, num_experts=num_experts, tile_tokens=tile.tokens, partial=of is not None)
    multiply = partial(multiply_tiled, order=order, tile=tile, num_tokens=num_tokens, choices=choices)
    gated_RI = multiply(x_TD if can_be_staged(x_TD) else x_TD.contiguous(), gate_up, gate_up_bias_EN, gate, None)
    parts_RD = multiply(gated_RI, down, down_bias_EN, None, weights_TK)
    return sum_experts(parts_RD, experts_TK, like=x_TD, partial=of is not None)


def _tile_of(mean: float) -> Mxfp4Tile:
    return next((tile for tokens, tile in _TILES.items() if mean <= tokens), _LARGEST_TILE)


def multiply_tiled(
    x_RC: Tensor,
    weight: Mxfp4Weight,
    bias_EN: Tensor,
    gate: ClampedGate | None,
    row_weights: Tensor | None,
    *,
    order: ExpertOrder,
    tile: Mxfp4Tile,
    num_tokens: int,
    choices: int,
) -> Tensor:
    """Multiplies one of the two layers. The first, with a gate, maps tokens' rows to rows in the order of experts; the
    second, without, maps those back to the order of tokens."""
    # NOTE: imported here because Gluon is experimental: with another Triton the import may fail.
    from baton.models.kernels.quantized.mxfp4_hopper import multiply_mxfp4_experts

    rows, steps = bias_EN.shape[1], weight.columns // TILE
    out = x_RC.new_empty(num_tokens * choices, rows if gate is None else rows // 2)
    limit, alpha = (0.0, 0.0) if gate is None else gate
    multiply_mxfp4_experts[(order.num_tiles * triton.cdiv(rows, TILE * tile.row_tiles),)](
        x_RC,
        weight.stored_ENB.flatten().view(torch.int32),
        weight.scales_ENG.flatten().view(torch.int32),
        bias_EN,
        row_weights,
        order.order_P,
        order.tiles_3L,
        out,
        order.num_tiles,
        x_RC.stride(0),
        limit,
        alpha,
        CHOICES=choices,
        IS_FIRST=gate is not None,
        OUT=rows,
        COLUMNS=weight.columns,
        GATED=gate is not None,
        GROUPS=tile.row_tiles,
        TOKENS=tile.tokens,
        AT_ONCE=max(each for each in range(1, tile.at_once + 1) if steps % each == 0),
        STAGES=tile.stages,
        WGMMA=tile.by_warpgroup,
        **overlap(x_RC.device, rows=num_tokens),
        num_warps=4 * tile.row_tiles,
    )
    return out
