"""ALiBi slopes (arXiv 2108.12409): how fast each head forgets. Knows no family. Shapes: H head."""

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """[H] float32: a geometric sequence over the heads that ends at 1/256; heads beyond a power of two get every other
    member of the sequence for twice as many."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)
