"""The number formats of GGUF files in plain torch: blocks of packed integers with scales, to float32.

Each product and sum is rounded to float32, as in ggml's own code, so results have the same bits.

Legend: B block, P byte of a block, S sub-block with its own scale, N number of a block.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

_PLAIN = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
_K_SUB_BLOCKS = 8
_K_SCALE_BYTES = 12


def dequantize(kind: str, blocks_BP: Tensor) -> Tensor:
    """Returns the numbers of blocks, [B, N] in float32.

    Args:
        kind: the format, such as "Q4_K"; one of those in `GGUF_TYPES`.
        blocks_BP: contiguous bytes.
    """
    if kind in _PLAIN:
        return blocks_BP.view(_PLAIN[kind]).float()
    return _BLOCKS[kind](blocks_BP)


def _scale(blocks_BP: Tensor, at: int) -> Tensor:
    """Returns the float16 number at byte `at` of each block, [B, 1] in float32."""
    return blocks_BP[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed_BP: Tensor, group: int) -> Tensor:
    """Returns the halves of bytes, for each group of bytes the low halves and then the high ones."""
    packed = packed_BP.unflatten(1, (-1, 1, group))
    return torch.cat([packed & 15, packed >> 4], dim=2).flatten(1)


def _fifth_bits(packed_B4: Tensor) -> Tensor:
    """Returns the bits of 4 bytes, lowest first, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed_B4.device)
    return ((packed_B4.unsqueeze(2) >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * (_halves(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * _halves(blocks[:, 4:], 16).float() + _scale(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _halves(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return _scale(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _halves(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _scale(blocks, 0) * numbers.float() + _scale(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _scale(blocks, 0)


def _scaled_k(blocks: Tensor, numbers_BN: Tensor) -> Tensor:
    """Returns the numbers of Q4_K or Q5_K, whose sub-blocks have scales and minima of 6 bits."""
    packed = blocks[:, 4 : 4 + _K_SCALE_BYTES].unflatten(1, (3, 4))
    low_scales, low_minima, high = packed.unbind(1)
    scales = torch.cat([low_scales & 63, (high & 15) | ((low_scales >> 2) & 48)], dim=1)
    minima = torch.cat([low_minima & 63, (high >> 4) | ((low_minima >> 2) & 48)], dim=1)
    scales_BS1 = (_scale(blocks, 0) * scales.float()).unsqueeze(2)
    minima_BS1 = (_scale(blocks, 2) * minima.float()).unsqueeze(2)
    numbers: Tensor = scales_BS1 * numbers_BN.float().unflatten(1, (_K_SUB_BLOCKS, -1)) - minima_BS1
    return numbers.flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_k(blocks, _halves(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1).flatten(1) << 4
    return _scaled_k(blocks, _halves(blocks[:, 48:], 32) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    low = _halves(blocks[:, :128], 64)
    high = ((blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3).flatten(1) << 4
    scales_BS1 = (_scale(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()).unsqueeze(2)
    numbers: Tensor = scales_BS1 * ((low | high).float() - 32).unflatten(1, (16, 16))
    return numbers.flatten(1)


_BLOCKS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
