"""What the block-sparse kernels are told of a pattern, and of where keys lie. Knows no kernel and no batch.

Legend: B blocks, N tokens in a block, H kv heads, D channels.
"""

from dataclasses import dataclass

from torch import Tensor

from attention.blocksparse import BlocksparseParams

LOG2E = 1.4426950408889634
# Stands for "all of them" where every block is local: no sequence has more.
_ALL_BLOCKS = 2**30
_DENSE_BLOCK_SIZE = 64
# Of a pattern; larger ones would not fit a tile, and the block size of the cache is independent of them.
SPARSE_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class KernelPattern:
    """A pattern in the numbers that kernels take: the offset of local head h is
    (first_offset + h // heads_per_offset) * step."""

    block_size: int
    local_blocks: int
    vert_stride: int
    step: int
    first_offset: int
    heads_per_offset: int


def kernel_pattern(params: BlocksparseParams | None) -> KernelPattern:
    """None: a dense layer, all of whose blocks are local."""
    if params is None:
        return KernelPattern(_DENSE_BLOCK_SIZE, _ALL_BLOCKS, vert_stride=1, step=0, first_offset=0, heads_per_offset=1)
    step, group = params.head_sliding_step, params.num_heads // params.num_kv_heads
    along_kv_heads = step < 0
    return KernelPattern(
        block_size=params.block_size,
        local_blocks=params.local_blocks,
        vert_stride=params.vert_stride,
        step=abs(step),
        first_offset=params.tp_rank * (params.num_kv_heads if along_kv_heads else params.num_heads),
        heads_per_offset=group if along_kv_heads else 1,
    )


@dataclass(frozen=True)
class Rows:
    """Keys or values as rows for the bulk copy engine: token n of block b and head h lies in row
    b * row_b + h * row_h + n, from column h * col_h on."""

    rows: Tensor
    row_b: int
    row_h: int
    col_h: int


def as_rows(kv_BNHD: Tensor) -> Rows | None:
    """None where strides or the address do not suit the copy engine."""
    num_blocks, block_size, num_heads, channels = kv_BNHD.shape
    stride_b, stride_n, stride_h, stride_d = kv_BNHD.stride()
    stride_b, stride_h = stride_b if num_blocks > 1 else 0, stride_h if num_heads > 1 else 0
    beside = stride_h < stride_n  # the heads of a token lie in its row
    per_16_bytes = 16 // kv_BNHD.element_size()
    if (
        stride_d != 1
        or kv_BNHD.data_ptr() % 16
        or stride_n % per_16_bytes
        or stride_b % stride_n
        or stride_h % (per_16_bytes if beside else stride_n)
    ):
        return None
    row_b, row_h, col_h = stride_b // stride_n, 0 if beside else stride_h // stride_n, stride_h if beside else 0
    num_rows = (num_blocks - 1) * row_b + (num_heads - 1) * row_h + block_size
    if num_rows >= 2**31:
        return None
    return Rows(kv_BNHD.as_strided((num_rows, (num_heads - 1) * col_h + channels), (stride_n, 1)), row_b, row_h, col_h)
