"""Describes keys or values of any cache layout as a matrix for the bulk tensor copy engine (TMA).

Legend: B blocks, N tokens in a block, H kv heads, C channels.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class TmaPlaces(NamedTuple):
    """The strides of the matrix: token n of block b and head h lies in row b * row_b + h * row_h + n, from column h *
    col_h on."""

    row_b: int
    row_h: int
    col_h: int


@dataclass(frozen=True)
class TmaRows:
    rows: Tensor
    places: TmaPlaces


def as_rows(kv_BNHC: Tensor) -> TmaRows | None:
    """Returns the matrix; None where the copy engine cannot read it, because address or strides are no multiples of 16
    bytes or its 32-bit coordinates cannot count the rows."""
    num_blocks, block_size, num_heads, channels = kv_BNHC.shape
    stride_b, stride_n, stride_h, stride_c = kv_BNHC.stride()
    # An axis of size 1 may have any stride.
    stride_b, stride_h = stride_b if num_blocks > 1 else 0, stride_h if num_heads > 1 else 0
    in_one_row = stride_h < stride_n  # all heads of a token
    per_16_bytes = 16 // kv_BNHC.element_size()
    if (
        not kv_BNHC.numel()
        or stride_c != 1
        or kv_BNHC.data_ptr() % 16
        or stride_n % per_16_bytes
        or stride_b % stride_n
        or stride_h % (per_16_bytes if in_one_row else stride_n)
    ):
        return None
    row_b = stride_b // stride_n
    row_h, col_h = (0, stride_h) if in_one_row else (stride_h // stride_n, 0)
    num_rows = (num_blocks - 1) * row_b + (num_heads - 1) * row_h + block_size
    if num_rows >= 2**31:
        return None
    rows = kv_BNHC.as_strided((num_rows, (num_heads - 1) * col_h + channels), (stride_n, 1))
    return TmaRows(rows, TmaPlaces(row_b, row_h, col_h))
