"""mxfp4 weights in the form that Hopper's kernel reads: tiles of 64 outputs by 64 inputs. Each thread loads 16 adjacent
bytes of a tile. The bits of eight numbers are spread over a word so that few instructions unpack them.

A tile's index counts warps (w), rows of a pair of rows (g), threads of a row (t), products of 16 inputs (j), rows of
the pair (r), inputs of a pair (p) and halves of the 16 inputs (h): output 16 w + 2 g + r, input 16 j + 8 h + 2 t + p.

Legend: N output channel, K input channel, G group of 32 inputs, B byte.
"""

from itertools import product

import torch
from torch import Tensor

from baton.models.formats.packed import unpack_halves

TILE = 64  # outputs of a tile, and inputs
SCALES_MAX = 128  # the exponent of 2: numbers times 2 ** 126 times a larger scale are not finite
# The bits of a word that a number's bits take: mantissa, exponent's low bit and high bit, sign. By halves and rows, for
# the first input of a pair; those of the second are 16 bits higher.
_PLACES = (((6, 7, 8, 15), (3, 4, 5, 12)), ((0, 1, 2, 9), (13, 10, 11, 14)))
# Scales are exponents with a bias of 127. Stored are the exponents of bfloat16 for 2 ** 126 times the scale.
_SCALES_PLUS = 126


def tile_(stored_NB: Tensor, scales_NG: Tensor) -> None:
    """Converts an expert from the form of `baton.models.formats.packed` in place.

    Args:
        stored_NB: contiguous; rows and columns are multiples of TILE.
        scales_NG: contiguous, at most SCALES_MAX.
    """
    numbers_NK = unpack_halves(stored_NB, 4).int()
    row_tiles, steps = numbers_NK.shape[0] // TILE, numbers_NK.shape[1] // TILE
    # [row tile, w, g, r, step, j, h, t, p] to [row tile, step, w, g, t, j, r, p, h]
    numbers = numbers_NK.reshape(row_tiles, 4, 8, 2, steps, 4, 2, 4, 2).permute(0, 4, 1, 2, 7, 5, 3, 8, 6)
    words = torch.zeros(numbers.shape[:-3], dtype=torch.int32, device=numbers.device)
    for row, pair, half in product(range(2), repeat=3):
        places = torch.tensor(_PLACES[half][row], dtype=torch.int32, device=words.device) + 16 * pair
        bits = torch.arange(16, dtype=torch.int32, device=words.device)[:, None] >> torch.arange(4, device=words.device)
        words |= ((bits & 1) << places).sum(1, dtype=torch.int32)[numbers[..., row, pair, half]]
    stored_NB.copy_(words.view(torch.uint8).view_as(stored_NB))
    scales = scales_NG.reshape(row_tiles, 4, 8, 2, steps, 2).permute(0, 4, 1, 2, 5, 3)
    scales_NG.copy_((scales + _SCALES_PLUS).reshape(scales_NG.shape))
