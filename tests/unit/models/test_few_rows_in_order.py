"""Batch-invariant products of few rows multiply, whichever axis of the instruction the weight is on; their bits are
compared on a GPU (`tests/gpu/test_batch_invariant.py`)."""

import pytest
import torch
from torch.nn.functional import linear

from baton.models.kernels.matmul.decode_matmul import DecodeTile
from baton.models.kernels.matmul.few_rows_in_order import MAX_ROWS, NarrowTile, adds_alike, choose, multiply_few_rows
from tests.device import DEVICE
from tests.unit.models.test_invariant_matmul import random

_NARROW = NarrowTile(16, 64, num_stages=2, prefetched=0)
_OF_64 = DecodeTile(MAX_ROWS, 64, 64, num_warps=4, num_stages=2)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", [_NARROW, _OF_64], ids=["columns", "rows"])
@pytest.mark.parametrize("num_rows", [1, 17, MAX_ROWS])
def test_sizes_that_fill_no_tile_are_multiplied(num_rows: int, tile: NarrowTile | DecodeTile, with_bias: bool) -> None:
    wide = random(num_rows, 200, dtype=torch.bfloat16).to(DEVICE)
    x = wide[:, :168]
    weight = random(90, 168, dtype=torch.bfloat16, seed=1).to(DEVICE)
    bias = random(90, dtype=torch.bfloat16, seed=2).to(DEVICE) if with_bias else None
    out = torch.full((num_rows, 90), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    multiply_few_rows(x, weight, bias, out, tile)
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(out.float(), expected, rtol=1.6e-2, atol=1e-2)


def test_a_weight_that_fills_the_gpu_in_tiles_of_64_is_the_product_s_rows() -> None:
    assert isinstance(choose(1, 28672, num_sms=132), DecodeTile)
    assert isinstance(choose(MAX_ROWS, 2048, num_sms=132), NarrowTile)


def test_only_a_gpu_whose_instruction_adds_alike_takes_them() -> None:
    assert not adds_alike(torch.device("cpu"))
