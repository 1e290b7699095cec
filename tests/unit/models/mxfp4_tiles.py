"""Reads `baton.models.formats.mxfp4_tiles` by the instructions of Hopper's kernel, in plain torch."""

import torch
from torch import Tensor

from baton.models.formats.mxfp4_tiles import TILE


def read_tiles(stored_NB: Tensor, scales_NG: Tensor) -> Tensor:
    """Returns an expert's weights, float32 [N, K]."""
    row_tiles, steps = stored_NB.shape[0] // TILE, stored_NB.shape[1] * 2 // TILE
    words = stored_NB.contiguous().view(torch.int32).reshape(row_tiles, steps, 4, 8, 4, 4)
    numbers = torch.zeros(*words.shape, 2, 2, 2, device=words.device)
    for pair in range(2):
        word = words >> (16 * pair)
        fourth = (word << 1) & 0x8000 | (word >> 3) & 0x0180 | (word >> 7) & 0x0040
        of_row_and_half = ((word & 0x81C0, word << 6 & 0x81C0), (word << 3 & 0x81C0, fourth))
        for row in range(2):
            for half in range(2):
                numbers[..., row, pair, half] = _bfloat16(of_row_and_half[row][half])
    factors = _bfloat16(scales_NG.reshape(row_tiles, steps, 4, 8, 2, 2).int() << 7)
    numbers *= factors.repeat_interleave(2, 4)[:, :, :, :, None, :, :, None, None]
    # From [row tile, step, w, g, t, j, r, p, h]: output 16 w + 2 g + r, input 16 j + 8 h + 2 t + p.
    return numbers.permute(0, 2, 3, 6, 1, 5, 8, 4, 7).reshape(row_tiles * TILE, steps * TILE)


def _bfloat16(bits: Tensor) -> Tensor:
    return (bits - (bits >> 15 << 16)).to(torch.int16).view(torch.bfloat16).float()
