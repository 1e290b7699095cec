"""Tiles of the Hopper kernel of experts with integers of 4 bits (`baton.models.kernels.quantized.packed_hopper`), for
its callers, which import the kernel only where it runs.
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
    """

    tokens: int
    rows: int
    at_once: int = 1
    stages: int = 4


def can_be_staged(x_TK: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, in which the kernel for Hopper copies them."""
    return x_TK.stride(0) % 16 == 0 and x_TK.data_ptr() % 16 == 0
