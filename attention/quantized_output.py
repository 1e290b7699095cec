"""An attention output, quantized for the layer that reads it."""

from typing import NamedTuple

import torch
from torch import Tensor

# Channels that share a scale.
BLOCK = 128


class QuantizedOutput(NamedTuple):
    """Memory for an output in e4m3 with a scale for every 128 channels of a token, as an fp8 layer reads it.

    Attributes:
        stored_THD: contiguous.
        scale_CT: float32, for the blocks of all heads.
        power_of_two: scales are rounded up to powers of two.
        dtype: the output is rounded to it before it is quantized.
    """

    stored_THD: Tensor
    scale_CT: Tensor
    power_of_two: bool
    dtype: torch.dtype
