"""Cutting the context of a batch's prefills into chunks that fit a fixed workspace. Pure planning, on the CPU."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.backend import ContextChunk, RaggedLens
from attention.cache_ops import TokenIndex
from attention.metadata import CommonAttentionMetadata


@dataclass(frozen=True)
class _Part:
    """Context tokens [start, stop) of one prefill."""

    prefill: int
    start: int
    stop: int


def plan_prefill(common: CommonAttentionMetadata, num_decodes: int) -> RaggedLens | None:
    """The prefills' own tokens as queries and as keys, counted from the first prefill token; None without prefills."""
    if num_decodes == common.num_reqs:
        return None
    starts_R = common.query_start_loc_cpu[num_decodes:] - common.query_start_loc_cpu[num_decodes]
    starts_on_device_R = starts_R.to(common.query_start_loc.device, non_blocking=True)
    starts = tuple(starts_R.tolist())
    return RaggedLens(starts_on_device_R, starts_on_device_R, starts, starts)


def plan_context_chunks(
    common: CommonAttentionMetadata, num_decodes: int, *, workspace_tokens: int, block_size: int
) -> tuple[ContextChunk, ...]:
    """The prefills' context, in order, in chunks of `workspace_tokens`; only the last may be smaller.

    A chunk names the prefills that it has context of, so no query is attended twice to the same context, and none to a
    chunk without context of its own.
    """
    context_lens = common.num_computed_tokens_cpu[num_decodes:].tolist()
    if not any(context_lens):
        return ()
    start_loc = (common.query_start_loc_cpu[num_decodes:] - common.query_start_loc_cpu[num_decodes]).numpy()
    block_table = common.block_table_tensor[num_decodes:]
    return tuple(
        _plan_chunk(parts, start_loc, block_table, block_size) for parts in _cut(context_lens, workspace_tokens)
    )


def _cut(context_lens: list[int], workspace_tokens: int) -> list[list[_Part]]:
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


def _plan_chunk(parts: list[_Part], start_loc: NDArray[np.int32], block_table: Tensor, block_size: int) -> ContextChunk:
    # Prefills without context may lie between the first and the last; they get no keys.
    first, last = parts[0].prefill, parts[-1].prefill
    num_keys = np.zeros(last - first + 1, dtype=np.int32)
    for part in parts:
        num_keys[part.prefill - first] = part.stop - part.start
    positions_S = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    prefills_S = np.repeat(np.arange(first, last + 1), num_keys)
    blocks_S, offsets_S = np.divmod(positions_S, block_size)
    block_ids_S = block_table.cpu().numpy()[prefills_S, blocks_S].astype(np.int64)
    query_starts = torch.from_numpy(start_loc[first : last + 2] - start_loc[first])
    key_starts = torch.from_numpy(np.concatenate(([0], np.cumsum(num_keys))).astype(np.int32))
    return ContextChunk(
        tokens=TokenIndex(block_ids_S, offsets_S),
        num_tokens=len(positions_S),
        query_start=int(start_loc[first]),
        query_stop=int(start_loc[last + 1]),
        lens=RaggedLens(
            query_start_loc=query_starts.to(block_table.device),
            key_start_loc=key_starts.to(block_table.device),
            query_start_loc_cpu=tuple(query_starts.tolist()),
            key_start_loc_cpu=tuple(key_starts.tolist()),
        ),
    )
