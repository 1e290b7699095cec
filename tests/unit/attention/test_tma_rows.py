"""Keys as rows for the copy engine: every number is where the row says, or there are no rows."""

import random

import pytest
import torch

from attention.kernels.tma_rows import as_rows

ORDERS = [(0, 1, 2), (0, 2, 1), (2, 0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_number_is_found_in_its_row(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    found = 0
    for _ in range(200):
        sizes = draw.choice([1, 2, 3]), draw.choice([1, 2, 16]), draw.choice([1, 3])
        channels, padding, others = draw.choice([8, 16, 24]), draw.choice([0, 1, 16]), draw.choice([1, 2])
        order = draw.choice(ORDERS)
        memory = torch.randint(0, 100, (sizes[order[0]], others, sizes[order[1]], sizes[order[2]], channels + padding))
        kept = memory.to(dtype)[:, 0, ..., :channels]
        kv_BNHC = kept.permute(*(order.index(axis) for axis in range(3)), 3)
        rows = as_rows(kv_BNHC)
        if rows is None:
            continue
        found += 1
        block, token, head = (draw.randrange(size) for size in sizes)
        row = block * rows.places.row_b + head * rows.places.row_h + token
        column = head * rows.places.col_h
        numbers = rows.rows[row, column : column + channels].float()
        assert torch.equal(numbers, kv_BNHC[block, token, head].float())
        assert rows.rows.stride(0) * dtype.itemsize % 16 == 0
    assert found > 20


def test_the_copy_engine_wants_multiples_of_16_bytes() -> None:
    numbers = torch.zeros(1 + 2 * 16 * 2 * 64, dtype=torch.float16)
    assert as_rows(numbers[1:].view(2, 16, 2, 64)) is None
    assert as_rows(torch.zeros(2, 16, 2, 66, dtype=torch.float16)[..., :64]) is None
    assert as_rows(torch.zeros(2, 16, 2, 128, dtype=torch.float16)[..., ::2]) is None


def test_no_keys_are_no_rows() -> None:
    assert as_rows(torch.zeros(1, 0, 2, 64)) is None


def test_more_rows_than_coordinates_reach_are_refused() -> None:
    cache = torch.empty(2**27 + 1, 16, 1, 64, dtype=torch.float16, device="meta")
    assert as_rows(cache) is None
