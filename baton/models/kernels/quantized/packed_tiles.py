"""Tiles of the Hopper kernels of products with weights of 4 bits (`baton.models.kernels.quantized.packed_hopper`), for
their callers, which import the kernels only where they run.
"""

from typing import NamedTuple

from torch import Tensor

# Inputs of one step, which have one scale.
HOPPER_STEP_MIN = 64


class HopperTile(NamedTuple):
    """The part of the result that one program of the kernel for Hopper computes.

    Attributes:
        at_once: steps of a stage.
        stages: number of stages whose weights are in shared memory or in flight, a power of two.
        programs_per_sm: programs that share tiles until each multiprocessor has as many.
        least_steps: of a program that shares a tile.
        staged_x: activations go through shared memory like weights.
    """

    tokens: int
    rows: int
    programs_per_sm: int = 1
    at_once: int = 1
    stages: int = 4
    least_steps: int = 4
    staged_x: bool = False


# On an H200, the four products of a layer of Llama-3.1-8B with groups of 128: 1 token 61 us, 16 tokens 79, 32 tokens
# 116, 64 tokens 230, 128 tokens 376. From 9 tokens on `packed_tma` is faster, so that these tiles of more tokens are
# those of batch-invariant products and of experts. Staged activations take 213 us for 1 token, and save 4 to 14 % from
# 32 tokens on.
_TILES = {
    8: HopperTile(8, rows=64, programs_per_sm=8),
    16: HopperTile(16, rows=128, programs_per_sm=4),
    32: HopperTile(32, rows=128, programs_per_sm=2, staged_x=True),
    64: HopperTile(64, rows=64, programs_per_sm=2, staged_x=True),
}
_TILE_OF_MANY = HopperTile(32, rows=128, programs_per_sm=2, staged_x=True)


def choose_tile(num_tokens: int) -> HopperTile:
    """The tile for this number of tokens."""
    return next((tile for tokens, tile in _TILES.items() if num_tokens <= tokens), _TILE_OF_MANY)


def can_be_staged(x_TK: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, in which the kernel for Hopper copies them."""
    return x_TK.stride(0) % 16 == 0 and x_TK.data_ptr() % 16 == 0
