"""Locates a batch's tokens in the paged cache: tokens to read, and slots to write.

On a CPU tokens are moved as runs, the longest pieces that are contiguous both in the cache and where they go. A run is
identified by its first element. A table of all possible runs is a view with strides (1, 1) over the memory, so one
`index_select` moves any set of tokens in any layout.

Legend: T new tokens, S tokens to read, R requests, K L B N H C as in `baton.kvcache.layout`.
"""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenIndex:
    """The places of single tokens in each layer. Made once per batch; the first layer computes what its device needs,
    and the others reuse it. On a GPU `TokenRanges` costs less: the host needs no numbers from the device."""

    def __init__(self, block_S: NDArray[np.int64], offset_S: NDArray[np.int64]) -> None:
        self._block_S = block_S
        self._offset_S = offset_S
        self._runs: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], tuple[tuple[int, int], Tensor]] = {}
        self._slots: Tensor | None = None

    def __len__(self) -> int:
        return len(self._block_S)

    def runs(self, kv_layer: Tensor, *, heads_first: bool) -> tuple[Tensor, Tensor]:
        """A table whose row i is the run that starts at the layer's element i, and the rows of these tokens.

        Their order is [K, S]; where the heads of a token lie apart, [K, H, S] (heads_first) or [K, S, H]. Rows of the
        table overlap, rows of different tokens do not.
        """
        key = (heads_first, kv_layer.shape[3:], kv_layer.stride())
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = self._find_runs(kv_layer, heads_first=heads_first)
        size, rows = found
        return kv_layer.as_strided(size, (1, 1)), rows

    def slots(self, kv_layer: Tensor) -> Tensor:
        """[S] int64 on the layer's device; copied there once."""
        if self._slots is None or self._slots.device != kv_layer.device:
            slots_S = torch.from_numpy(self._block_S * kv_layer.shape[2] + self._offset_S)
            self._slots = slots_S.to(kv_layer.device, non_blocking=True)
        return self._slots

    def _find_runs(self, kv_layer: Tensor, *, heads_first: bool) -> tuple[tuple[int, int], Tensor]:
        num_k, _, _, num_heads, channels = kv_layer.shape
        stride_K, stride_B, stride_N, stride_H, _ = kv_layer.stride()
        run = num_heads * channels if num_heads == 1 or stride_H == channels else channels
        extent = 1 + sum((size - 1) * stride for size, stride in zip(kv_layer.shape, kv_layer.stride(), strict=True))
        runs_S = self._block_S * stride_B + self._offset_S * stride_N
        if run < num_heads * channels:
            heads_H = np.arange(num_heads) * stride_H
            runs_S = np.add.outer(heads_H, runs_S) if heads_first else np.add.outer(runs_S, heads_H)
        rows = np.add.outer(np.arange(num_k) * stride_K, runs_S).reshape(-1)
        return (extent - run + 1, run), torch.from_numpy(rows)


class TokenRanges:
    """Consecutive tokens of several requests, request after request. A GPU gathers them by tables on the device, which
    the host does not read; on a CPU their index is computed once.

    Attributes:
        block_table: [R, blocks] int32.
        start_loc: [R + 1] int32, where each request's tokens begin among the gathered ones; the last is their number.
        first_position: [R] int32, the position of each request's first token. All three on the cache's device.
        num_tokens: tokens of all requests together.
    """

    def __init__(self, block_table: Tensor, start_loc: Tensor, first_position: Tensor, *, num_tokens: int) -> None:
        self.block_table = block_table
        self.start_loc = start_loc
        self.first_position = first_position
        self.num_tokens = num_tokens
        self._index: TokenIndex | None = None

    def __len__(self) -> int:
        return self.num_tokens

    def index(self, block_size: int) -> TokenIndex:
        """The same tokens one by one; reads the tensors, which must be on the CPU."""
        if self._index is None:
            starts_R = self.start_loc.numpy()
            requests_S = np.repeat(np.arange(len(starts_R) - 1), np.diff(starts_R))
            positions_S = np.arange(self.num_tokens) + (self.first_position.numpy() - starts_R[:-1])[requests_S]
            blocks_S, offsets_S = np.divmod(positions_S, block_size)
            self._index = TokenIndex(self.block_table.numpy()[requests_S, blocks_S].astype(np.int64), offsets_S)
        return self._index


class WriteIndex:
    """The slots of a batch's new tokens; -1 writes nothing. On a CPU its runs are computed once.

    Attributes:
        slot_mapping: [T] int64, on the cache's device.
    """

    def __init__(self, slot_mapping: Tensor, block_size: int) -> None:
        self.slot_mapping = slot_mapping
        self._block_size = block_size

    @cached_property
    def rows(self) -> Tensor | None:
        """The tokens of a batch on a CPU that have a slot. Returns None if all have one."""
        slots_T = self.slot_mapping.numpy()
        return torch.from_numpy(np.flatnonzero(slots_T >= 0)) if len(slots_T) and slots_T.min() < 0 else None

    @cached_property
    def tokens(self) -> TokenIndex:
        slots_T = self.slot_mapping if self.rows is None else self.slot_mapping[self.rows]
        return TokenIndex(*np.divmod(slots_T.numpy(), self._block_size))
