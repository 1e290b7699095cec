"""mxfp4 in plain torch. In the published form a byte has an even input in its low half and the next in its high half,
and 16 bytes share a scale. Products read the form of `baton.models.formats.packed`.

Legend: E expert, N output channel, C input channel, G group of 32 inputs, B byte.
"""

import math

import torch
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.config.quantization.mxfp4_config import MXFP4_BLOCK
from baton.models.formats.packed import pack_halves, unpack_halves

BLOCK_BYTES = MXFP4_BLOCK // 2
# Indexed by a number's bits: sign, two of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_NAN = 255  # as a scale (e8m0)


def check_scales(name: str, scales: Tensor, *, dtype: torch.dtype) -> None:
    """Checks that scaled numbers stay finite.

    Args:
        name: the tensor's name in the checkpoint, for the error.
        dtype: dtype in which numbers times scales are computed.

    Raises:
        ConfigError: some scale makes a number infinite or NaN.
    """
    most = math.floor(math.log2(torch.finfo(dtype).max / max(_VALUES))) + _SCALE_BIAS
    if not bool((scales > most).any()):
        return
    largest = int(scales.max())
    too_large = f"2^{largest - _SCALE_BIAS}, too large for {str(dtype).removeprefix('torch.')}"
    meaning = "NaN" if largest == _NAN else too_large
    raise ConfigError(
        f"{name} has a scale of {largest}, which is {meaning}",
        field="model",
        value=largest,
        allowed=(f"0 to {most}",),
        cure="download the checkpoint again, or take another",
    )


def repack_(blocks_NGB: Tensor) -> None:
    """Converts the published form to the form of products, in place."""
    numbers = torch.stack([blocks_NGB & 15, blocks_NGB >> 4], dim=-1).flatten(1)
    blocks_NGB.copy_(pack_halves(numbers, 4).view(blocks_NGB.shape))


def dequantize(blocks_NGB: Tensor, scales_NG: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Returns [N, C] in `dtype`, from an expert's numbers in the form of products and exponents of two."""
    values = torch.tensor(_VALUES + tuple(-value for value in _VALUES), device=blocks_NGB.device)
    numbers_NGC = values[unpack_halves(blocks_NGB.flatten(1), 4).long()].unflatten(1, (-1, MXFP4_BLOCK))
    return torch.ldexp(numbers_NGC, (scales_NG.int() - _SCALE_BIAS).unsqueeze(-1)).flatten(1).to(dtype)
