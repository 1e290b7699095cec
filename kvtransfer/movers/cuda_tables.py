"""What a mover on a GPU keeps beside the staging: block ids of requests on the device, and copies of a few bytes.

All of it is made before there is traffic, in pieces that requests take and give back. Knows nothing of segments.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.errors import InternalError

# Copies bytes between device memory and pinned memory, either way: target, source, how many, stream.
Copy = Callable[[int, int, int, int], None]

# Requests of fewer blocks take as much as this many.
_LEAST_BLOCKS = 64
# So many requests of a size find room at first, and so many more whenever there is none.
_AT_ONCE = 4


def open_copy() -> Copy:
    """The driver's own call. Through torch the same costs four times as much of the host, and a segment has one or two
    on either side. A GPU must have been used by this process."""
    # PyDLL, which keeps the GIL: the call only queues, and a thread that lets the GIL go may wait for milliseconds.
    call = ctypes.PyDLL("libcuda.so.1").cuMemcpyAsync
    call.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
        status = call(target, source, num_bytes, stream)
        if status != 0:
            raise InternalError(f"the GPU's driver did not copy {num_bytes} bytes (status {status})")

    return copy


class BlockTable:
    """A request's block ids on the device, from some operation of the tables' stream on.

    Attributes:
        block_ids: int64; the first `count` of them are the request's.
    """

    def __init__(self, tables: "BlockTables", block_ids: Tensor, pinned: NDArray[np.int64]) -> None:
        self._tables = tables
        self.block_ids = block_ids
        self.pinned = pinned
        self.addresses = block_ids.data_ptr(), int(pinned.ctypes.data)
        self.count = 0

    def free(self) -> None:
        self._tables.give_back(self)


class BlockTables:
    """Tables for one stream, whose operations alone read them: so that a table's next ids are copied behind whatever
    still reads the last."""

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
        # NOTE: the copy of the request before may not have run, if nothing was begun with it; it then brings some of
        # these ids, and the one queued here brings all.
        table.pinned[: table.count] = block_ids
        self._copy(*table.addresses, 8 * table.count, self._stream.cuda_stream)
        return table

    def give_back(self, table: BlockTable) -> None:
        self._free[len(table.pinned)].append(table)

    def _make(self, size: int) -> None:
        # NOTE: on that stream, and not filled: a fill on another one may come behind the first ids, and is then read in
        # their place.
        with torch.cuda.stream(self._stream):
            device = torch.empty((_AT_ONCE, size), dtype=torch.int64, device=self._stream.device)
        pinned = torch.empty((_AT_ONCE, size), dtype=torch.int64, pin_memory=True).numpy()
        made = [BlockTable(self, *rows) for rows in zip(device, pinned, strict=True)]
        self._free.setdefault(size, []).extend(made)
