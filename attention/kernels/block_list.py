"""Lists the blocks of several requests in one tensor, on the device. Legend: R requests, B blocks."""

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def list_blocks(block_table_RB: Tensor, start_loc_R: Tensor, *, out: Tensor) -> None:
    """Writes request r's blocks, in order, to `out[start_loc[r] : start_loc[r + 1]]`.

    Args:
        block_table_RB: int32; may have more rows than `start_loc_R` has requests.
        start_loc_R: [R + 1] int32, where each request's blocks begin.
        out: int32.
    """
    num_reqs, num_columns = start_loc_R.shape[0] - 1, block_table_RB.shape[1]
    _list_blocks[num_reqs, triton.cdiv(num_columns, _TILE)](
        block_table_RB, start_loc_R, out, block_table_RB.stride(0), TILE=_TILE
    )


@triton.jit
def _list_blocks(block_table, start_loc, out, stride_r, TILE: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(start_loc + request)
    stop = tl.load(start_loc + request + 1)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    listed = columns < stop - start
    blocks = tl.load(block_table + request * stride_r + columns, mask=listed)
    tl.store(out + start + columns, blocks, mask=listed)
