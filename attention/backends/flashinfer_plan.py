"""Planning for both flashinfer backends: lists of blocks, and wrappers that get a new plan for every batch.

Imports no flashinfer. Legend: R requests.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.backend import AttentionNeeds
from attention.kernels.block_list import list_blocks
from attention.metadata import CommonAttentionMetadata
from baton.core.errors import InternalError


class PlannedWrapper:
    """A flashinfer wrapper with its latest plan.

    Attributes:
        wrapper: flashinfer's own object; call its `run`.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied = torch.cuda.Event()

    def plan(self, *args: object, **kwargs: object) -> None:
        """Calls the wrapper's `plan` after the device has read the previous plan, which lies in pinned memory."""
        self._copied.synchronize()
        self.wrapper.plan(*args, **kwargs)
        self._copied.record()


@dataclass(frozen=True)
class BlockLists:
    """The blocks of requests in flashinfer's form. Only the block ids are on the device.

    Attributes:
        start_loc: [R + 1] int32, where each request's blocks begin among `block_ids`.
        block_ids: int32, on the device, request after request; undefined past the last.
        last_block_lens: [R] int32, how many slots of each request's last block are used.
        seq_lens: [R] int32.
    """

    start_loc: Tensor
    block_ids: Tensor
    last_block_lens: Tensor
    seq_lens: Tensor

    def of(self, start: int, stop: int) -> "BlockLists":
        """Returns the lists of requests [start, stop)."""
        starts = self.start_loc[start : stop + 1]
        first = int(starts[0])
        return BlockLists(
            starts - first, self.block_ids[first:], self.last_block_lens[start:stop], self.seq_lens[start:stop]
        )


class BlockLister:
    """Builds the block lists of successive batches in the same memory.

    Attributes:
        buffer: int32 on the device; holds all lists, and captured graphs read it.
    """

    def __init__(self, needs: AttentionNeeds) -> None:
        blocks_per_request = -(-needs.max_model_len // needs.block_size)
        self._block_size = needs.block_size
        self.buffer = torch.zeros(needs.max_num_reqs * blocks_per_request, dtype=torch.int32, device=needs.device)
        self._start_loc = torch.zeros(needs.max_num_reqs + 1, dtype=torch.int32, device=needs.device)

    def list(self, common: CommonAttentionMetadata, *, skipped_blocks: int = 0) -> BlockLists:
        """Lists a batch's blocks. The lists stay valid until the next call, and for work queued on the device before
        that.

        Args:
            skipped_blocks: number of leading blocks to leave out of each request, with their tokens.

        Raises:
            InternalError: the batch has more requests or blocks than the backend was made for.
        """
        num_reqs = common.num_reqs
        lens_R = common.seq_lens_cpu[:num_reqs] - skipped_blocks * self._block_size
        counts_R = (lens_R + (self._block_size - 1)) // self._block_size
        start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32)
        torch.cumsum(counts_R, 0, out=start_loc[1:])
        num_blocks = int(start_loc[-1])
        if num_reqs >= len(self._start_loc) or num_blocks > len(self.buffer):
            raise InternalError(
                f"a batch of {num_reqs} requests and {num_blocks} blocks; room for {len(self._start_loc) - 1} and "
                f"{len(self.buffer)}",
                field="max_num_reqs",
            )
        start_loc_on_device = self._start_loc[: num_reqs + 1]
        start_loc_on_device.copy_(start_loc, non_blocking=True)
        list_blocks(common.block_table_tensor[:, skipped_blocks:], start_loc_on_device, out=self.buffer)
        last_block_lens = lens_R - (counts_R - 1).clamp_min_(0) * self._block_size
        return BlockLists(start_loc, self.buffer, last_block_lens, lens_R)
