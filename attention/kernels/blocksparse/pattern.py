"""A block-sparse pattern as the kernels' arguments."""

from dataclasses import dataclass

from attention.blocksparse import BlocksparseParams

LOG2E = 1.4426950408889634
# The number of local blocks where every block is local: no sequence has more.
_ALL_BLOCKS = 2**30
_DENSE_BLOCK_SIZE = 64
# Largest block of a pattern: larger blocks would not fit a tile. The cache's block size is independent of it.
SPARSE_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class KernelPattern:
    """A pattern as numbers for kernels. The offset of local head h is (first_offset + h // heads_per_offset) * step."""

    block_size: int
    local_blocks: int
    vert_stride: int
    step: int
    first_offset: int
    heads_per_offset: int


def kernel_pattern(params: BlocksparseParams | None) -> KernelPattern:
    """Converts a pattern to kernel form. None is a dense layer, whose blocks are all local."""
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
