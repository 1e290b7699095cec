"""The tiles that Hopper's kernel reads hold the numbers of the other form, where its instructions look for them."""

import torch

from baton.models.formats import mxfp4
from baton.models.formats.mxfp4_tiles import SCALES_MAX, TILE, tile_
from tests.unit.models.mxfp4_tiles import read_tiles

ROWS, COLUMNS = 2 * TILE, 3 * TILE


def test_the_kernels_instructions_find_the_numbers_in_tiles() -> None:
    torch.manual_seed(0)
    stored = torch.randint(0, 256, (ROWS, COLUMNS // 32, mxfp4.BLOCK_BYTES), dtype=torch.uint8)
    scales = torch.randint(0, SCALES_MAX + 1, (ROWS, COLUMNS // 32), dtype=torch.uint8)
    expected = mxfp4.dequantize(stored, scales, dtype=torch.float32)
    tile_(stored.flatten(1), scales)
    actual = read_tiles(stored.flatten(1), scales)
    # The smallest products are not exact in bfloat16, which has fewer numbers below 2 ** -126.
    assert torch.equal(actual.bfloat16(), expected.bfloat16())
