"""Turns a decode step's metadata into the next step's, in place and without the host. Library API.

Legend: R requests.
"""

import torch
from torch import Tensor

from attention.metadata import CommonAttentionMetadata
from baton.core.errors import InternalError


def advance_step(common: CommonAttentionMetadata, block_size: int) -> Tensor:
    """Advances a decode step's metadata by one token, on the device and on the CPU; returns the positions [R] int64.

    The block table must already contain the next token's block. Padding (sequence length 0) stays padding.

    Raises:
        InternalError: a request is not a decode, or its next token lies past the block table.
    """
    shared = common.seq_lens.data_ptr() == common.seq_lens_cpu.data_ptr()
    advance_on_host(common, block_size)
    if shared:
        # On a CPU a tensor and its copy may share memory, which has then advanced already.
        return _place_last_tokens(common, block_size)
    return advance_on_device(common, block_size)


def advance_on_device(common: CommonAttentionMetadata, block_size: int) -> Tensor:
    """Advances the tensors on the device. A CUDA graph can capture the call: each replay advances by one token and
    writes the positions to the returned tensor. Call `advance_on_host` with each replay.

    A token past the block table gets slot -1.
    """
    common.seq_lens.add_(common.seq_lens > 0)
    return _place_last_tokens(common, block_size)


def advance_on_host(common: CommonAttentionMetadata, block_size: int) -> None:
    """Advances only the copies on the CPU.

    Raises:
        InternalError: as `advance_step`.
    """
    if common.max_query_len != 1:
        raise InternalError(
            f"a request of the batch has {common.max_query_len} new tokens",
            field="max_query_len",
            value=common.max_query_len,
            allowed=("1: only decodes can advance",),
        )
    longest, room = int(common.seq_lens_cpu.max()) + 1, common.block_table_tensor.shape[1] * block_size
    if longest > room:
        raise InternalError(
            f"a request of the batch would have {longest} tokens, and its block table holds {room}",
            field="block_table_tensor",
            cure="build the next step's metadata with longer block tables",
        )
    is_request_R = common.seq_lens_cpu > 0
    common.num_computed_tokens_cpu.add_(is_request_R)
    common.seq_lens_cpu.add_(is_request_R)


def _place_last_tokens(common: CommonAttentionMetadata, block_size: int) -> Tensor:
    """Sets the slot of each request's last token; returns its position, 0 for padding."""
    positions_R = (common.seq_lens - 1).clamp_min_(0).long()
    blocks_R = positions_R // block_size
    last = common.block_table_tensor.shape[1] - 1
    block_ids_R = common.block_table_tensor.gather(1, blocks_R.clamp_max(last).unsqueeze(1)).squeeze(1)
    slots_R = block_ids_R.long() * block_size + positions_R % block_size
    is_placed_R = (common.seq_lens > 0) & (blocks_R <= last)
    common.slot_mapping[: common.num_reqs].copy_(torch.where(is_placed_R, slots_R, -1))
    return positions_R
