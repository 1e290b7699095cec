"""Splits the block tables of decodes after the keys that a group of them shares. Legend: R rows, B blocks of a row."""

import triton
import triton.language as tl
from torch import Tensor

_TILE_BLOCKS = 1024


def split_tables(
    rows: Tensor,
    num_keys: Tensor,
    lens_R: Tensor,
    *,
    seq_lens_R: Tensor,
    table_RB: Tensor,
    block_size: int,
    own_lens_R: Tensor,
    tables: Tensor,
) -> None:
    """Writes the lengths and tables of the rows without the shared keys. Reads no memory of the host.

    Args:
        rows: int32, its first number is the first row of the group.
        num_keys: int32, the keys that the group shares, whole blocks.
        lens_R: int32, `num_keys` for rows of the group and 0 for others.
        tables: [R + 1, B] int32, gets the blocks of the shared keys, then each row's other blocks; entries past them
            are unchanged.
    """
    assert table_RB.stride() == tables.stride()
    num_rows, width = table_RB.shape
    _split_kernel[(num_rows + 1, triton.cdiv(width, _TILE_BLOCKS))](
        rows,
        num_keys,
        lens_R,
        seq_lens_R,
        table_RB,
        own_lens_R,
        tables,
        table_RB.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK_B=_TILE_BLOCKS,
    )


@triton.jit(do_not_specialize=["stride"])
def _split_kernel(
    rows_ptr,
    num_keys_ptr,
    lens_ptr,
    seq_lens_ptr,
    table_ptr,
    own_lens_ptr,
    tables_ptr,
    stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Copies BLOCK_B blocks: of the shared keys, through the group's first row, or of one row's other keys."""
    target = tl.program_id(0)
    if target == 0:
        row = tl.load(rows_ptr)
        skipped = 0
        num_keys = tl.load(num_keys_ptr)
    else:
        row = target - 1
        skipped = tl.load(lens_ptr + row)
        num_keys = tl.maximum(tl.load(seq_lens_ptr + row) - skipped, 0)
        if tl.program_id(1) == 0:
            tl.store(own_lens_ptr + row, num_keys)
    blocks = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = blocks < (num_keys + BLOCK_SIZE - 1) // BLOCK_SIZE
    source_ptr = table_ptr + row.to(tl.int64) * stride + skipped // BLOCK_SIZE
    tl.store(tables_ptr + target.to(tl.int64) * stride + blocks, tl.load(source_ptr + blocks, mask=mask), mask=mask)
