"""Which tiles the products of experts are cut into. Knows shapes only: what the router chose stays on the device.

An expert's weights are read once per tile of its tokens, from memory the first time and then from L2. Few tokens per
expert: small tiles, so that many programs stream weights at once; many: large ones, for the tensor cores.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """One product's. Channels are those of the output (of gate and of up each), inputs those of a step."""

    tokens: int
    channels: int
    inputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpertTiles:
    """Both products of a layer; they share the order, and so the tokens of a tile."""

    gate_up: Tiles
    down: Tiles


# By tokens of a tile. Buffers fill at most half of a multiprocessor's shared memory, so that two programs share it and
# one loads while the other begins or ends; only the largest tiles take all of it.
_HALF_PRECISION = (
    ExpertTiles(Tiles(16, 64, 128, 4, 3), Tiles(16, 64, 128, 4, 4)),
    ExpertTiles(Tiles(32, 64, 64, 4, 5), Tiles(32, 64, 128, 4, 4)),
    ExpertTiles(Tiles(64, 64, 64, 4, 4), Tiles(64, 128, 64, 4, 4)),
    ExpertTiles(Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)),
)
_FP8 = (
    ExpertTiles(Tiles(16, 64, 128, 4, 4), Tiles(16, 64, 128, 4, 6)),
    ExpertTiles(Tiles(32, 64, 128, 4, 4), Tiles(32, 64, 128, 4, 5)),
    ExpertTiles(Tiles(64, 64, 128, 4, 3), Tiles(64, 128, 128, 8, 3)),
    ExpertTiles(Tiles(128, 64, 128, 8, 3), Tiles(128, 128, 128, 8, 4)),
)
# Without tensor cores.
_SINGLE_PRECISION = ExpertTiles(Tiles(16, 32, 32, 4, 2), Tiles(16, 32, 32, 4, 2))


def tiles_for(
    *, num_assignments: int, num_experts: int, dtype: torch.dtype, fp8: bool, batch_invariant: bool
) -> ExpertTiles:
    """The smallest tiles that hold an expert's tokens and a third more; some will have more than their share."""
    if dtype == torch.float32:
        return _SINGLE_PRECISION
    table = _FP8 if fp8 else _HALF_PRECISION
    if batch_invariant:
        return table[2]
    for tiles in table[:-1]:
        if 4 * num_assignments <= 3 * num_experts * tiles.gate_up.tokens:
            return tiles
    return table[-1]
