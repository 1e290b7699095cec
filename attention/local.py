"""Chunked local attention for backends that only support causal attention. Each chunk with new tokens becomes a virtual
request, whose keys begin with the chunk. Library API.

Legend: R requests, V virtual requests, B blocks of a chunk.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.host_to_device import to_device
from attention.metadata import CommonAttentionMetadata, check_causal
from baton.core.errors import ConfigError


def make_local_attention_virtual_batches(
    attn_chunk_size: int,
    query_start_loc_np: NDArray[np.int32],
    seq_lens_np: NDArray[np.int32],
    block_table: Tensor,
    block_size: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Tensor]:
    """Returns (query lengths [V], query starts [V + 1], sequence lengths [V], block tables [V, B]) of the virtual
    requests. A request's virtual requests follow one another, so the tokens keep their order.

    A request without new tokens, such as padding (sequence length 0), has no virtual requests. Entries of a block table
    past a virtual request's blocks repeat one of its request's blocks.

    Args:
        query_start_loc_np: [R + 1].
        seq_lens_np: [R].
        block_table: [R, blocks]; the result is on the same device.

    Raises:
        ConfigError: the block size does not divide the chunk size, so a chunk's keys would begin within a block.
    """
    if attn_chunk_size < 1 or attn_chunk_size % block_size:
        raise ConfigError(
            f"attention_chunk_size is {attn_chunk_size}",
            field="attention_chunk_size",
            value=attn_chunk_size,
            allowed=(f"a multiple of the block size ({block_size})",),
            cure="change the block size, or take a backend that has chunked_local",
        )
    query_lens_R = np.diff(query_start_loc_np).astype(np.int64)
    seq_lens_R = seq_lens_np.astype(np.int64)
    context_lens_R = seq_lens_R - query_lens_R
    first_chunk_R = context_lens_R // attn_chunk_size
    has_tokens_R = (query_lens_R > 0) & (seq_lens_R > 0)
    num_chunks_R = np.where(has_tokens_R, (seq_lens_R - 1) // attn_chunk_size - first_chunk_R + 1, 0)

    request_V = np.repeat(np.arange(len(seq_lens_R)), num_chunks_R)
    first_V_of_R = np.cumsum(num_chunks_R) - num_chunks_R
    chunk_V = first_chunk_R[request_V] + np.arange(len(request_V)) - first_V_of_R[request_V]
    start_V = chunk_V * attn_chunk_size
    stop_V = np.minimum(start_V + attn_chunk_size, seq_lens_R[request_V])
    query_lens_V = stop_V - np.maximum(start_V, context_lens_R[request_V])
    query_start_loc_V = np.concatenate(([0], np.cumsum(query_lens_V)))

    blocks_VB = start_V[:, None] // block_size + np.arange(attn_chunk_size // block_size)
    blocks_VB = np.minimum(blocks_VB, (seq_lens_R[request_V, None] - 1) // block_size)
    rows, columns = to_device((request_V[:, None], blocks_VB), block_table.device)
    return (
        query_lens_V.astype(np.int32),
        query_start_loc_V.astype(np.int32),
        (stop_V - start_V).astype(np.int32),
        block_table[rows, columns],
    )


def local_attention_metadata(
    common: CommonAttentionMetadata, attn_chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Returns the batch as virtual requests. Causal attention over them is chunked local attention over the batch.

    New tokens are written to the same slots. ALiBi and windows remain correct because they depend on distances.

    Raises:
        ConfigError: as `make_local_attention_virtual_batches`.
        InternalError: the batch is not causal.
    """
    check_causal(common)
    query_lens_V, starts, seq_lens_V, block_table = make_local_attention_virtual_batches(
        attn_chunk_size,
        common.query_start_loc_cpu.numpy(),
        common.seq_lens_cpu.numpy(),
        common.block_table_tensor,
        block_size,
    )
    query_start_loc, seq_lens = to_device((starts, seq_lens_V), common.seq_lens.device)
    return replace(
        common,
        query_start_loc=query_start_loc,
        query_start_loc_cpu=torch.from_numpy(starts),
        seq_lens=seq_lens,
        seq_lens_cpu=torch.from_numpy(seq_lens_V),
        num_computed_tokens_cpu=torch.from_numpy(seq_lens_V - query_lens_V),
        num_reqs=len(query_lens_V),
        max_query_len=int(query_lens_V.max(initial=0)),
        block_table_tensor=block_table,
    )
