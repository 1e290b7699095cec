"""Cuts the context of a batch's prefills into chunks that fit a fixed workspace. The host plans all chunks and sends
them to the device in one copy."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from attention.backend import ContextChunk, RaggedLens
from attention.host_to_device import to_device
from attention.metadata import CommonAttentionMetadata, check_causal
from baton.kvcache.tokens import TokenRanges


@dataclass(frozen=True)
class _Part:
    """Context tokens [start, stop) of one prefill."""

    prefill: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Cut:
    """One chunk on the host: the starts of queries and keys of the prefills from `first` on, each with the last's end,
    and the position of each prefill's first key. A prefill without context has no keys."""

    first: int
    query_starts: list[int]
    key_starts: list[int]
    first_positions: list[int]


def plan_prefill(common: CommonAttentionMetadata, num_decodes: int) -> RaggedLens | None:
    """Returns the prefills' own tokens as queries and as keys, counted from the first prefill token; None without
    prefills.

    Raises:
        InternalError: the batch is not causal.
    """
    if num_decodes == common.num_reqs:
        return None
    check_causal(common)
    starts = tuple(_query_starts(common, num_decodes))
    num_decode_tokens = int(common.query_start_loc_cpu[num_decodes])
    on_device = common.query_start_loc[num_decodes : common.num_reqs + 1] - num_decode_tokens
    return RaggedLens(on_device, on_device, starts, starts)


def plan_context_chunks(
    common: CommonAttentionMetadata, num_decodes: int, *, workspace_tokens: int
) -> tuple[ContextChunk, ...]:
    """Cuts the prefills' context, in order, into chunks of `workspace_tokens`; only the last may be smaller.

    A chunk names the prefills whose context it holds, so no query attends twice to the same context or to a chunk
    without its own context.
    """
    context_lens = common.num_computed_tokens_cpu[num_decodes : common.num_reqs].tolist()
    if not any(context_lens):
        return ()
    query_starts = _query_starts(common, num_decodes)
    cuts = [_cut(parts, query_starts) for parts in _parts_of_chunks(context_lens, workspace_tokens)]
    lists = [numbers for cut in cuts for numbers in (cut.query_starts, cut.key_starts, cut.first_positions)]
    on_device = to_device([np.array(numbers, dtype=np.int32) for numbers in lists], common.block_table_tensor.device)
    block_table = common.block_table_tensor[num_decodes:]
    return tuple(
        _chunk(cut, block_table, *on_device[3 * index : 3 * index + 3], base=query_starts[cut.first])
        for index, cut in enumerate(cuts)
    )


def _query_starts(common: CommonAttentionMetadata, num_decodes: int) -> list[int]:
    """Returns where each prefill's queries begin, counted from the first prefill token, and where the last prefill's
    queries end."""
    starts_R = common.query_start_loc_cpu[num_decodes : common.num_reqs + 1]
    starts: list[int] = (starts_R - starts_R[0]).tolist()
    return starts


def _parts_of_chunks(context_lens: list[int], workspace_tokens: int) -> list[list[_Part]]:
    chunks: list[list[_Part]] = []
    room = 0
    for prefill, context_len in enumerate(context_lens):
        start = 0
        while start < context_len:
            if not room:
                chunks.append([])
                room = workspace_tokens
            stop = min(start + room, context_len)
            chunks[-1].append(_Part(prefill, start, stop))
            room -= stop - start
            start = stop
    return chunks


def _cut(parts: list[_Part], query_starts: list[int]) -> _Cut:
    first, last = parts[0].prefill, parts[-1].prefill
    num_keys = [0] * (last - first + 1)
    first_positions = [0] * (last - first + 1)
    for part in parts:
        num_keys[part.prefill - first] = part.stop - part.start
        first_positions[part.prefill - first] = part.start
    return _Cut(
        first=first,
        query_starts=[start - query_starts[first] for start in query_starts[first : last + 2]],
        key_starts=list(accumulate(num_keys, initial=0)),
        first_positions=first_positions,
    )


def _chunk(
    cut: _Cut,
    block_table: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    first_position: Tensor,
    *,
    base: int,
) -> ContextChunk:
    num_tokens = cut.key_starts[-1]
    return ContextChunk(
        tokens=TokenRanges(
            block_table[cut.first : cut.first + len(cut.first_positions)],
            key_start_loc,
            first_position,
            num_tokens=num_tokens,
        ),
        num_tokens=num_tokens,
        query_start=base,
        query_stop=base + cut.query_starts[-1],
        lens=RaggedLens(query_start_loc, key_start_loc, tuple(cut.query_starts), tuple(cut.key_starts)),
    )
