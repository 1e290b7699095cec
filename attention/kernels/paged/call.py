"""The arguments of one attention over a batch: tensors and features, derived shapes, and the tuples that both kernels
take.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

from attention.kernels.paged.work_list import WorkList

# Bytes of keys and values that the programs running at one time may share through the L2 cache. On an H200 with 128
# heads and 8192 keys the limit gives 614 TFLOPS instead of 500.
L2_KEY_BYTES = 16 * 2**20
LOG2E = 1.4426950408889634


# NOTE: Triton specialises every member of a kernel's tuple argument and ignores `do_not_specialize` there. Numbers in a
# tuple would therefore compile a kernel anew for a batch of other lengths, so they are separate arguments, which the
# kernels group (`LogSumExps`, `Requests`, `AttentionTiles`).


class Rows(NamedTuple):
    """A matrix of queries or outputs [T, H, channels] with adjacent channels."""

    ptr: Tensor
    stride_t: int
    stride_h: int


class LogSumExps(NamedTuple):
    """The log-sum-exps [H, T] in float32; the pointer may be None."""

    ptr: Tensor | None
    stride_h: int
    stride_t: int


class Requests(NamedTuple):
    """The places of each request's queries and keys."""

    num_reqs: int
    query_start_ptr: Tensor
    key_start_ptr: Tensor | None
    seq_lens_ptr: Tensor | None
    block_table_ptr: Tensor | None
    table_stride: int


class AttentionTiles(NamedTuple):
    """One program for each pair of a tile of tokens and a pack of query heads, `section` packs at a time."""

    num_tiles: int
    num_packs: int
    section: int


class Mask(NamedTuple):
    """Constants that decide which keys a query sees; 0 means no window or no chunks. Without `causal`, a window has two
    sides."""

    causal: bool
    window: int
    chunk: int


@dataclass(frozen=True)
class Keys:
    """The keys and values of a call, in a paged cache or in one block.

    Attributes:
        keys, values: [B, N, H, D] and [B, N, H, V]; without a block table, one block holds all keys.
        key_start_loc: [R + 1] int32; only without a block table.
        seq_lens, block_table: [R] and [R, blocks] int32, of a paged cache.
        expected_len: rough number of keys of one request; a wrong number costs only time.
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
class KernelFeatures:
    """The features of a layer, as `attention.parameters` defines them, and the scales of fp8 numbers."""

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
class AttentionCall:
    """One attention of queries [T, H, D] into `out` [T, H, V]; a request has at most `max_query_len` queries.

    Attributes:
        work: the batch's tiles, for a persistent kernel; None: each tile gets its own program. Without a block table,
            give it only if each request's keys are in the same rows as its queries.
        splits: number of programs that share a tile's keys.
    """

    q_THD: Tensor
    keys: Keys
    query_start_loc: Tensor
    max_query_len: int
    scale: float
    features: KernelFeatures
    out: Tensor
    lse_HT: Tensor | None
    work: WorkList | None = None
    splits: int = 1

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
    def lse(self) -> LogSumExps:
        return LogSumExps(self.lse_HT, *((0, 0) if self.lse_HT is None else self.lse_HT.stride()))

    @property
    def requests(self) -> Requests:
        keys = self.keys
        return Requests(
            num_reqs=self.num_reqs,
            query_start_ptr=self.query_start_loc,
            key_start_ptr=keys.key_start_loc,
            seq_lens_ptr=keys.seq_lens,
            block_table_ptr=keys.block_table,
            table_stride=0 if keys.block_table is None else keys.block_table.stride(0),
        )

    @property
    def mask(self) -> Mask:
        features = self.features
        return Mask(features.causal, features.sliding_window or 0, features.attention_chunk_size or 0)

    @property
    def head_key_bytes(self) -> int:
        """Bytes of one kv head's keys and values of a request of the expected length."""
        channels = self.keys.keys.shape[-1] + self.keys.values.shape[-1]
        return max(1, self.keys.expected_len) * channels * self.keys.keys.element_size()

    def tiles(self, rows: int, pack: int) -> AttentionTiles:
        """Returns tiles of `rows` rows, shared by `pack` query heads of a kv head.

        The number of tiles is an upper bound for any lengths of the requests.
        """
        packs_per_kv_head = -(-self.group // pack)
        return AttentionTiles(
            num_tiles=self.q_THD.shape[0] // (rows // pack) + self.num_reqs,
            num_packs=self.num_kv_heads * packs_per_kv_head,
            section=min(self.num_kv_heads, max(1, L2_KEY_BYTES // self.head_key_bytes)) * packs_per_kv_head,
        )


def rows_of(tensor_THC: Tensor) -> Rows:
    return Rows(tensor_THC, *tensor_THC.stride()[:2])


def split_channels(size: int) -> tuple[int, int]:
    """Splits `size` channels into one or two powers of two that hold them: 192 is 128 and 64, 80 is 64 and 16, 112 is
    128."""
    whole = max(16, triton.next_power_of_2(size))
    rest = max(16, triton.next_power_of_2(size - whole // 2)) if whole > 16 else whole
    return (whole, 0) if rest * 2 >= whole else (whole // 2, rest)
