"""A batch's metadata for all layers and backends: positions of queries, sequences and new tokens.

Callers that form a batch use `plan_batch`. Legend: R requests, T tokens.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.host_to_device import to_device
from baton.core.errors import InternalError
from baton.kvcache.tokens import WriteIndex


@dataclass(frozen=True)
class AttentionMetadata:
    """The part of a planned batch that layers read; each backend adds its own.

    Attributes:
        new_tokens: the places for the batch's KV.
        num_actual_tokens: rows of the query without padding; outputs past them are unchanged.
    """

    new_tokens: WriteIndex
    num_actual_tokens: int


@dataclass
class CommonAttentionMetadata:
    """The metadata of one batch. Decodes come first (`reorder_batch_to_split_decodes_and_prefills`).

    Attributes:
        query_start_loc, query_start_loc_cpu: [R + 1] int32, where each request's queries start among the tokens.
        seq_lens, seq_lens_cpu: [R] int32, computed plus new tokens.
        num_computed_tokens_cpu: [R] int32, tokens whose KV was in the cache before this batch.
        num_actual_tokens: number of tokens without padding.
        block_table_tensor: [R, blocks] int32; entries past a request's own blocks are never read.
        slot_mapping: int64, a slot for each token; slots past `num_actual_tokens` are set to -1 here, so that a full
            CUDA graph that was captured for more tokens writes nothing for them.
        causal: whether a query sees only keys up to its own position; False for an encoder's keys.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    num_computed_tokens_cpu: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool = True

    def __post_init__(self) -> None:
        if self.slot_mapping.shape[0] > self.num_actual_tokens:
            self.slot_mapping[self.num_actual_tokens :].fill_(-1)


@dataclass(frozen=True)
class PaddedBatch:
    """A batch in tensors of fixed sizes that a CUDA graph reads: tokens of decodes, then of prompts, then padding.

    Prompts follow the decodes directly, so the first token of a prompt may lie among the rows of `decode_seq_lens`.

    Attributes:
        decode_seq_lens, decode_table: [N] and [N, blocks] int32, one row for each of the first N tokens; the length is
            0 for tokens that are no decodes.
        query_start_loc: [P + 1] int32, where each prompt's queries start. At least one of the P requests is padding of
            length 0; its queries are all tokens after the prompts.
        seq_lens, block_table: [P] and [P, blocks] int32.
        max_query_len: an upper bound.
        slot_mapping: [T] int64; -1 for padding.
    """

    decode_seq_lens: Tensor
    decode_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    slot_mapping: Tensor


@dataclass(frozen=True)
class HostBatch:
    """A batch on the host, before the copy to the device.

    Attributes:
        query_start_loc_R, seq_lens_R, context_lens_R: as in `CommonAttentionMetadata`.
        block_table: [R, blocks] int32, padded with 0.
        slots_T, positions_T: [T] int64, of the new tokens.
    """

    query_start_loc_R: NDArray[np.int32]
    seq_lens_R: NDArray[np.int32]
    context_lens_R: NDArray[np.int32]
    block_table: NDArray[np.int32]
    slots_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]

    @property
    def to_copy(self) -> tuple[NDArray[np.int32] | NDArray[np.int64], ...]:
        """Returns the arrays that the device needs, in the order of `common`'s argument."""
        return self.query_start_loc_R, self.seq_lens_R, self.block_table, self.slots_T, self.positions_T

    def common(self, copied: Sequence[Tensor]) -> tuple[CommonAttentionMetadata, Tensor]:
        """Returns the metadata over the copied tensors, and the positions."""
        query_start_loc, seq_lens, block_table, slot_mapping, positions = copied
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=torch.from_numpy(self.query_start_loc_R),
            seq_lens=seq_lens,
            seq_lens_cpu=torch.from_numpy(self.seq_lens_R),
            num_computed_tokens_cpu=torch.from_numpy(self.context_lens_R),
            num_reqs=len(self.seq_lens_R),
            num_actual_tokens=len(self.positions_T),
            max_query_len=int(np.diff(self.query_start_loc_R).max()),
            block_table_tensor=block_table,
            slot_mapping=slot_mapping,
        )
        return common, positions


def plan_batch(
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    width_multiple: int = 1,
) -> HostBatch:
    """Computes a batch from each request's lengths and block table.

    Args:
        block_tables: one per request; arrays of C ints are read fastest.
        width_multiple: the block table's width is rounded up to a multiple of it.

    Raises:
        InternalError: a request has no new tokens, or fewer blocks than its tokens need.
    """
    query_lens_R = np.array(query_lens, dtype=np.int32)
    context_lens_R = np.array(context_lens, dtype=np.int32)
    seq_lens_R = query_lens_R + context_lens_R
    num_blocks_R = np.array([len(blocks) for blocks in block_tables], dtype=np.int32)
    _check_batch(query_lens_R, context_lens_R, num_blocks_R, block_size)
    num_reqs = len(query_lens_R)
    table = block_rectangle(block_tables, -(-int(num_blocks_R.max()) // width_multiple) * width_multiple)
    starts = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(query_lens_R, out=starts[1:])
    requests_T = np.repeat(np.arange(num_reqs), query_lens_R)
    positions_T = np.arange(starts[-1], dtype=np.int64) + (context_lens_R - starts[:-1])[requests_T]
    blocks_T, offsets_T = np.divmod(positions_T, block_size)
    slots_T = table[requests_T, blocks_T].astype(np.int64) * block_size + offsets_T
    return HostBatch(starts, seq_lens_R, context_lens_R, table, slots_T, positions_T)


def build_common_metadata(
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> tuple[CommonAttentionMetadata, Tensor]:
    """Returns the metadata of a batch (`plan_batch`) and its tokens' positions [T] int64. Library API.

    It makes one copy to the device and does not wait for it. On a CPU, tensors and their CPU copies are the same.
    """
    batch = plan_batch(
        query_lens=query_lens, context_lens=context_lens, block_tables=block_tables, block_size=block_size
    )
    return batch.common(to_device(batch.to_copy, device))


def split_decodes_and_prefills(
    common: CommonAttentionMetadata, decode_threshold: int = 1, *, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """Returns (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch whose decodes come first.

    A decode is a request with at most `decode_threshold` new tokens and any context. After a prefill such a request
    counts as a prefill too; a prompt's last token can come there, in a chunk of its own.

    Args:
        require_uniform: all decodes must have as many new tokens as the first one. The first request with another
            number, and all after it, count as prefills. Requests without new tokens at the end are padding of a uniform
            batch.
    """
    if common.max_query_len <= decode_threshold and (not require_uniform or decode_threshold == 1):
        return common.num_reqs, 0, common.num_actual_tokens, 0
    query_lens_R = np.diff(common.query_start_loc_cpu.numpy())
    is_prefill_R = query_lens_R > decode_threshold
    if require_uniform:
        is_padding_R = np.cumsum(query_lens_R[::-1])[::-1] == 0
        is_prefill_R |= (query_lens_R != query_lens_R[0]) & ~is_padding_R
    if not is_prefill_R.any():
        return common.num_reqs, 0, common.num_actual_tokens, 0
    num_decodes = int(is_prefill_R.argmax())
    num_decode_tokens = int(common.query_start_loc_cpu[num_decodes])
    num_prefills, num_prefill_tokens = common.num_reqs - num_decodes, common.num_actual_tokens - num_decode_tokens
    return num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens


def check_causal(common: CommonAttentionMetadata) -> None:
    """Checks that a batch is causal, for backends whose kernels always are.

    Raises:
        InternalError: the batch is not causal.
    """
    if not common.causal:
        raise InternalError(
            "the batch is not causal, but this backend only computes causal attention",
            field="causal",
            value=common.causal,
            allowed=("True",),
            cure="ask for the feature encoder when the backend is selected",
        )


def reorder_batch_to_split_decodes_and_prefills(
    query_lens: Sequence[int],
    swap: Callable[[int, int], None],
    decode_threshold: int = 1,
    *,
    context_lens: Sequence[int] | None = None,
) -> bool:
    """Moves the decodes to the front by the fewest swaps; returns True if anything moved. `swap` exchanges two rows of
    the caller's batch; `query_lens` is the order before any swap. Library API.

    Args:
        context_lens: number of tokens whose KV is in the cache. If given, there are three classes in this order:
            decodes, later chunks of prompts, prompts without context. A prompt without context is no decode, however
            short.
    """
    if context_lens is not None:
        return _sort_by_swaps(
            [
                2 if not context_len else int(query_len > decode_threshold)
                for query_len, context_len in zip(query_lens, context_lens, strict=True)
            ],
            swap,
        )
    decodes = [row for row, query_len in enumerate(query_lens) if query_len <= decode_threshold]
    num_decodes = len(decodes)
    early_prefills = [row for row in range(num_decodes) if query_lens[row] > decode_threshold]
    late_decodes = [row for row in decodes if row >= num_decodes]
    for prefill, decode in zip(early_prefills, reversed(late_decodes), strict=True):
        swap(prefill, decode)
    return bool(early_prefills)


def _sort_by_swaps(classes: list[int], swap: Callable[[int, int], None]) -> bool:
    """Sorts rows of classes 0, 1 and 2 by the fewest swaps; two rows that belong in each other's places are swapped
    first."""
    wanted = sorted(classes)
    moved = False
    for is_mutual in (True, False):
        for row, own in enumerate(classes):
            if classes[row] == wanted[row]:
                continue
            others = (
                other
                for other in range(row + 1, len(classes))
                if classes[other] == wanted[row] != wanted[other] and (wanted[other] == own or not is_mutual)
            )
            other = next(others, None)
            if other is not None:
                swap(row, other)
                classes[row], classes[other] = classes[other], classes[row]
                moved = True
    return moved


def common_prefix_len(
    block_tables: Sequence[Sequence[int]], num_computed_tokens: Sequence[int], block_size: int
) -> int:
    """Returns how many leading tokens all requests have in the same blocks. It counts whole blocks that were computed
    before this batch.

    Cascade attention attends to these tokens once if a builder's `use_cascade_attention` returns true. Library API.
    """
    most = min(num_computed_tokens, default=0) // block_size
    shared = np.array(block_tables[0][:most]) if most else np.empty(0)
    for blocks in block_tables[1:]:
        if not len(shared):
            break
        others = np.array(blocks[: len(shared)])
        differs = others != shared[: len(others)]
        shared = shared[: int(differs.argmax()) if differs.any() else len(others)]
    return len(shared) * block_size


def block_rectangle(rows: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """Pads the rows with 0 to one array. 256 arrays of up to 128 numbers take 80 us; row by row in numpy 200 us."""
    filling, flat = array("i", bytes(4 * width)), array("i")
    for row in rows:
        flat.extend(row)
        flat.extend(filling[len(row) :])
    return np.frombuffer(flat, dtype=np.int32).reshape(len(rows), width)


def _check_batch(
    query_lens_R: NDArray[np.int32],
    context_lens_R: NDArray[np.int32],
    num_blocks_R: NDArray[np.int32],
    block_size: int,
) -> None:
    if not len(query_lens_R) == len(context_lens_R) == len(num_blocks_R) > 0:
        raise InternalError(
            f"{len(query_lens_R)} query lengths, {len(context_lens_R)} contexts, {len(num_blocks_R)} block tables"
        )
    if query_lens_R.min() < 1 or context_lens_R.min() < 0:
        raise InternalError("a request without new tokens, or with a negative context", field="query_lens")
    missing_R = query_lens_R + context_lens_R - num_blocks_R.astype(np.int64) * block_size
    if missing_R.max() > 0:
        request = int(missing_R.argmax())
        raise InternalError(
            f"request {request} of the batch has {query_lens_R[request] + context_lens_R[request]} tokens "
            f"and blocks for {num_blocks_R[request] * block_size}",
            field="block_tables",
        )
