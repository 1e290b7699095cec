"""The tile sizes of grouped products, by dtype and by the tokens that an expert gets."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupedTiles:
    """Tile sizes of one product. `channels` of the output (of gate and of up each), `inputs` of one step."""

    tokens: int
    channels: int
    inputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of both products of a layer, which share the order and so the tokens of a tile."""

    gate_up: GroupedTiles
    down: GroupedTiles


# By tokens of a tile. Buffers fill at most half of a multiprocessor's shared memory: two programs share it, and one
# loads while the other begins or ends. Only the largest tiles take all of it.
_HALF_PRECISION = (
    ExpertTiles(GroupedTiles(16, 64, 128, 4, 3), GroupedTiles(16, 64, 128, 4, 4)),
    ExpertTiles(GroupedTiles(32, 64, 64, 4, 5), GroupedTiles(32, 64, 128, 4, 4)),
    ExpertTiles(GroupedTiles(64, 64, 64, 4, 4), GroupedTiles(64, 128, 64, 4, 4)),
    ExpertTiles(GroupedTiles(128, 128, 64, 8, 4), GroupedTiles(128, 256, 64, 8, 4)),
)
_FP8 = (
    ExpertTiles(GroupedTiles(16, 64, 128, 4, 4), GroupedTiles(16, 64, 128, 4, 6)),
    ExpertTiles(GroupedTiles(32, 64, 128, 4, 4), GroupedTiles(32, 64, 128, 4, 5)),
    ExpertTiles(GroupedTiles(64, 64, 128, 4, 3), GroupedTiles(64, 128, 128, 8, 3)),
    ExpertTiles(GroupedTiles(128, 64, 128, 8, 3), GroupedTiles(128, 128, 128, 8, 4)),
)
# Without tensor cores.
_SINGLE_PRECISION = ExpertTiles(GroupedTiles(16, 32, 32, 4, 2), GroupedTiles(16, 32, 32, 4, 2))


def tiles_for(
    *, num_assignments: int, num_experts: int, dtype: torch.dtype, fp8: bool, batch_invariant: bool
) -> ExpertTiles:
    """Returns the smallest tiles that hold an expert's mean share of tokens and a third more, because shares are
    uneven."""
    if dtype == torch.float32:
        return _SINGLE_PRECISION
    table = _FP8 if fp8 else _HALF_PRECISION
    if batch_invariant:
        return table[2]
    for tiles in table[:-1]:
        if 4 * num_assignments <= 3 * num_experts * tiles.gate_up.tokens:
            return tiles
    return table[-1]
