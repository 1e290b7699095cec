"""ALiBi slopes (arXiv 2108.12409): how fast each head forgets. Knows no family; no torch."""

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Of each head: a geometric sequence that ends at 1/256; heads beyond a power of two get every other member of the
    sequence for twice as many."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(num_heads - power)]
    return tuple(slopes)
