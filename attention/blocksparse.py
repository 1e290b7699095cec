"""Which blocks of keys a block of queries sees: local blocks and vertical stripes. Pure values and their pattern.

Semantics of BLOCKSPARSE_FLASH_ATTN, which Phi-3-small was trained with. Knows no kernel and no cache.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlocksparseParams:
    """Query block i and key block j are `block_size` tokens each, counted from the sequence's start.

    Head h sees, causally within the block on the diagonal, key block j <= i if it is local, i - j < local_blocks, or on
    a vertical stripe, (j + offset(h) + 1) % vert_stride == 0. offset(h) is 0 where heads are alike (homo_head);
    otherwise each head, or each run of them, begins elsewhere, as `head_sliding_step` says.

    Attributes:
        max_seqlen: the longest sequence the pattern is asked for.
        num_heads, num_kv_heads: of this rank.
        active_head_range: of the whole model's heads those that this rank computes, [start, stop); None: all.
    """

    max_seqlen: int
    num_heads: int
    num_kv_heads: int
    block_size: int = 64
    local_blocks: int = 16
    vert_stride: int = 8
    homo_head: bool = False
    head_sliding_step: int = 0
    active_head_range: tuple[int, int] | None = None
