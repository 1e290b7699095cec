"""What `ragged` and `unified` hand to the kernels: where keys lie, what is asked for, and what follows from shapes.

Knows no kernel, so that each launcher can import it.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

# Keys and values that the programs running at one time may share through the L2 cache. On an H200 with 128 heads of
# 8192 keys: 614 TFLOPS, and 500 without a limit.
L2_KEY_BYTES = 16 * 2**20
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Keys:
    """Attributes:
    keys, values: [B, N, H, D] and [B, N, H, V], where a block is all there is if `block_table` is None.
    key_start_loc: [R + 1] int32; without a block table.
    seq_lens, block_table: [R] and [R, blocks] int32; of a paged cache.
    expected_len: keys of one request, roughly; costs time where it is wrong.
    """

    keys: Tensor
    values: Tensor
    key_start_loc: Tensor | None
    seq_lens: Tensor | None
    block_table: Tensor | None
    expected_len: int

    @property
    def block_size(self) -> int:
        return 0 if self.block_table is None else self.keys.shape[1]


@dataclass(frozen=True)
class Features:
    """What `attention.parameters` defines, and the scales of numbers in fp8."""

    causal: bool = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes_H: Tensor | None = None
    sinks_H: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One attention: queries [T, H, D], `max_query_len` of a request at most, into `out` [T, H, V]."""

    q_THD: Tensor
    keys: Keys
    query_start_loc: Tensor
    max_query_len: int
    scale: float
    features: Features
    out: Tensor
    lse_HT: Tensor | None

    @property
    def num_reqs(self) -> int:
        return self.query_start_loc.shape[0] - 1

    @property
    def num_kv_heads(self) -> int:
        return self.keys.keys.shape[2]

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_THD.shape[1] // self.num_kv_heads

    @property
    def lse_strides(self) -> tuple[int, int]:
        return (0, 0) if self.lse_HT is None else (self.lse_HT.stride(0), self.lse_HT.stride(1))

    @property
    def table_stride(self) -> int:
        return 0 if self.keys.block_table is None else self.keys.block_table.stride(0)

    def num_packs(self, pack: int) -> int:
        """How often a token's query heads have to be taken, if `pack` of a kv head share a tile."""
        return self.num_kv_heads * -(-self.group // pack)

    def num_tiles(self, tokens: int) -> int:
        """Bound of the tiles of `tokens` tokens of one request each: known without the lengths."""
        return self.q_THD.shape[0] // tokens + self.num_reqs

    def section(self, pack: int) -> int:
        """Packs at a time, so that their keys stay in the L2 cache."""
        channels = self.keys.keys.shape[-1] + self.keys.values.shape[-1]
        key_bytes = max(1, self.keys.expected_len) * channels * self.keys.keys.element_size()
        return min(self.num_kv_heads, max(1, L2_KEY_BYTES // key_bytes)) * -(-self.group // pack)


def split_channels(size: int) -> tuple[int, int]:
    """`size` channels as one or two powers of two, or a little more: 192 is 128 and 64, 80 is 64 and 16, 112 is 128."""
    whole = max(16, triton.next_power_of_2(size))
    rest = max(16, triton.next_power_of_2(size - whole // 2)) if whole > 16 else whole
    return (whole, 0) if rest * 2 >= whole else (whole // 2, rest)
