"""Block ids of requests on the device, and the driver's copy of a few bytes, for the mover on a GPU.

Tables are allocated before traffic; requests take them and give them back.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.errors import InternalError

# Copies bytes between device memory and pinned memory: target, source, number of bytes, stream.
Copy = Callable[[int, int, int, int], None]

# Size of the smallest table, in blocks.
_LEAST_BLOCKS = 64
# Tables of one size that are allocated together.
_AT_ONCE = 4


def open_copy() -> Copy:
    """Copies through the driver. The same copy through torch takes four times as much host time, and a segment has one
    or two on either side. This process must have used a GPU before."""
    # PyDLL keeps the GIL: the call only queues, and a thread that releases the GIL may wait milliseconds for it.
    call = ctypes.PyDLL("libcuda.so.1").cuMemcpyAsync
    call.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
        status = call(target, source, num_bytes, stream)
        if status != 0:
            raise InternalError(f"the GPU's driver did not copy {num_bytes} bytes (status {status})")

    return copy


class BlockTable:
    """A request's block ids on the device, valid for operations queued on the tables' stream after `place`.

    Attributes:
        block_ids: int64; the first `count` are the request's.
    """

    def __init__(self, tables: "BlockTables", block_ids: Tensor, pinned: NDArray[np.int64]) -> None:
        self._tables = tables
        self.block_ids = block_ids
        self.pinned = pinned
        self.addresses = block_ids.data_ptr(), int(pinned.ctypes.data)
        self.count = 0

    def free(self) -> None:
        self._tables.give_back(self)


@dataclass(frozen=True)
class PlacedTables:
    """A request's blocks, which KV and index share, and its state's slot as a table of one."""

    paged: BlockTable
    slot: BlockTable | None

    def free(self) -> None:
        self.paged.free()
        if self.slot is not None:
            self.slot.free()


class BlockTables:
    """Tables for one stream. Only its operations read them, so a table's new ids are copied after all reads of its
    old ones."""

    def __init__(self, stream: torch.cuda.Stream, copy: Copy, *, max_blocks: int) -> None:
        self._stream = stream
        self._copy = copy
        self._free: dict[int, list[BlockTable]] = {}
        size = _LEAST_BLOCKS
        while size < 2 * max_blocks:
            self._make(size)
            size *= 2

    def place(self, block_ids: Sequence[int]) -> BlockTable:
        size = max(_LEAST_BLOCKS, 1 << (len(block_ids) - 1).bit_length())
        if not self._free.get(size):
            self._make(size)
        table = self._free[size].pop()
        table.count = len(block_ids)
        # NOTE: the previous request's copy may not have run yet, if that request began no operation. It then copies
        # some of these ids, and the copy queued here copies all of them.
        table.pinned[: table.count] = block_ids
        self._copy(*table.addresses, 8 * table.count, self._stream.cuda_stream)
        return table

    def give_back(self, table: BlockTable) -> None:
        self._free[len(table.pinned)].append(table)

    def _make(self, size: int) -> None:
        # NOTE: allocated on that stream and not filled: a fill on another stream could run after the first ids are
        # copied, and overwrite them.
        with torch.cuda.stream(self._stream):
            device = torch.empty((_AT_ONCE, size), dtype=torch.int64, device=self._stream.device)
        pinned = torch.empty((_AT_ONCE, size), dtype=torch.int64, pin_memory=True).numpy()
        made = [BlockTable(self, *rows) for rows in zip(device, pinned, strict=True)]
        self._free.setdefault(size, []).extend(made)
