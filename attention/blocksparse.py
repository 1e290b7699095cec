"""The block-sparse pattern of Phi-3-small: a block of queries sees local blocks and vertical stripes of keys.

It holds pure values without numpy, because gateways read models' configs; `attention.blocksparse_mask` has the masks.
"""

from dataclasses import dataclass

from baton.core.errors import ConfigError


@dataclass(frozen=True)
class BlocksparseParams:
    """A block-sparse pattern. Query block i and key block j are `block_size` tokens each, counted from the sequence's
    start.

    A head sees key block j <= i if the block is local, i - j < local_blocks, or on one of the head's stripes, (j +
    offset + 1) % vert_stride == 0, with each head's offset from `head_offsets`. The block on the diagonal is causal.

    Attributes:
        max_seqlen: the longest sequence that the model was made for; it does not limit the pattern.
        num_heads, num_kv_heads: of one tensor-parallel rank.
        homo_head: all heads have the same stripes; takes precedence over `homo_head_group`.
        homo_head_group: the query heads of a kv head have the same stripes.
        tp_rank, tp_size: this rank, and the number of ranks that share the model's heads.

    Raises:
        ConfigError: a value is out of its range, or the kv heads do not divide the heads.
    """

    max_seqlen: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    local_blocks: int
    vert_stride: int
    homo_head: bool = False
    homo_head_group: bool = False
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (
            ("max_seqlen", 1),
            ("num_heads", 1),
            ("num_kv_heads", 1),
            ("block_size", 1),
            ("local_blocks", 0),
            ("vert_stride", 1),
            ("tp_size", 1),
        ):
            if getattr(self, name) < minimum:
                raise self._refuse(name, f"an integer of at least {minimum}")
        if self.num_heads % self.num_kv_heads:
            raise self._refuse("num_kv_heads", f"a divisor of num_heads ({self.num_heads})")
        if not 0 <= self.tp_rank < self.tp_size:
            raise self._refuse("tp_rank", f"0 to {self.tp_size - 1}, one of tp_size ranks")

    @property
    def head_sliding_step(self) -> int:
        """Number of blocks by which each head's stripes precede the previous head's; 0: all heads are alike. If
        negative, its absolute value is the step from kv head to kv head."""
        if self.homo_head:
            return 0
        heads = self.num_kv_heads if self.homo_head_group else self.num_heads
        step = max(1, self.vert_stride // (self.tp_size * heads))
        return -step if self.homo_head_group else step

    @property
    def active_head_range(self) -> tuple[int, int]:
        """This rank's query heads among the whole model's, [start, stop)."""
        return self.tp_rank * self.num_heads, (self.tp_rank + 1) * self.num_heads

    @property
    def head_offsets(self) -> tuple[int, ...]:
        """Number of blocks by which the stripes of each of this rank's heads precede the stripes of offset 0."""
        step = self.head_sliding_step
        if step >= 0:
            return tuple(head * step for head in range(*self.active_head_range))
        first_kv_head, group = self.tp_rank * self.num_kv_heads, self.num_heads // self.num_kv_heads
        return tuple((first_kv_head + head // group) * -step for head in range(self.num_heads))

    def _refuse(self, name: str, allowed: str) -> ConfigError:
        value = getattr(self, name)
        return ConfigError(f"blocksparse {name} is {value}", field=name, value=value, allowed=(allowed,))
