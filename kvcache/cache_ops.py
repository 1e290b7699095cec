"""Reading and writing the paged cache by strides alone, so for every layout and block size.

Slots and positions in, tensors out; `kvcache.wire.gather_scatter` moves whole requests.

On a GPU everything is a Triton kernel. On a CPU runs are moved, the longest pieces that are contiguous both in the
cache and where they go: a run is named by the place of its first element, and a table of all possible runs is a view
with strides (1, 1) over the memory, so one `index_select` moves any set of tokens in any layout.

Legend: T new tokens, S tokens to read, R requests, K L B N H C as in `kvcache.layout`.
"""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.fp8 import dequantize, is_fp8, quantize
from kvcache.kernels.gather import gather_ranges, gather_slots
from kvcache.kernels.store import store


class TokenIndex:
    """Where some tokens lie in each layer, one by one. Made once per batch; what the cache's device needs is worked out
    at the first layer. On a GPU `TokenRanges` costs less: it needs no numbers from the device."""

    def __init__(self, block_S: NDArray[np.int64], offset_S: NDArray[np.int64]) -> None:
        self._block_S = block_S
        self._offset_S = offset_S
        self._worked_out: dict[tuple[bool, tuple[int, ...]], tuple[tuple[int, int], Tensor]] = {}
        self._slots: Tensor | None = None

    def __len__(self) -> int:
        return len(self._block_S)

    def runs(self, kv_layer: Tensor, *, heads_first: bool) -> tuple[Tensor, Tensor]:
        """A table whose row i is the run that starts at the layer's element i, and the rows that are these tokens: in
        order [K, S], or [K, H, S] (heads_first) or [K, S, H] where the heads of a token lie apart.

        Rows of the table overlap; those of different tokens do not.
        """
        key = (heads_first, kv_layer.stride())
        worked_out = self._worked_out.get(key)
        if worked_out is None:
            worked_out = self._worked_out[key] = self._work_out(kv_layer, heads_first=heads_first)
        size, rows = worked_out
        return kv_layer.as_strided(size, (1, 1)), rows

    def slots(self, kv_layer: Tensor) -> Tensor:
        """[S] int64 on the layer's device; copied there once."""
        if self._slots is None or self._slots.device != kv_layer.device:
            slots_S = torch.from_numpy(self._block_S * kv_layer.shape[2] + self._offset_S)
            self._slots = slots_S.to(kv_layer.device, non_blocking=True)
        return self._slots

    def _work_out(self, kv_layer: Tensor, *, heads_first: bool) -> tuple[tuple[int, int], Tensor]:
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
    """Consecutive tokens of several requests, request after request: what a GPU gathers without the host knowing a
    single block. On a CPU it is worked out once.

    Attributes:
        block_table: [R, blocks] int32.
        start_loc: [R + 1] int32, where each request's tokens begin among the gathered; the last is their number.
        first_position: [R] int32, the position of each request's first token. All three on the cache's device.
        num_tokens: of all requests.
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
    """Where a batch's new tokens go: a slot for each, -1 writes nothing. On a CPU its runs are worked out only once.

    Attributes:
        slot_mapping: [T] int64, on the cache's device.
    """

    def __init__(self, slot_mapping: Tensor, block_size: int) -> None:
        self.slot_mapping = slot_mapping
        self._block_size = block_size

    @cached_property
    def rows(self) -> Tensor | None:
        """Of a CPU's batch the tokens that are written at all; None: every one."""
        slots_T = self.slot_mapping.numpy()
        return torch.from_numpy(np.flatnonzero(slots_T >= 0)) if len(slots_T) and slots_T.min() < 0 else None

    @cached_property
    def tokens(self) -> TokenIndex:
        slots_T = self.slot_mapping if self.rows is None else self.slot_mapping[self.rows]
        return TokenIndex(*np.divmod(slots_T.numpy(), self._block_size))


def store_kv(
    kv_layer: Tensor,
    k_THC: Tensor,
    v_THC: Tensor,
    index: WriteIndex,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes the new tokens' keys and values into one layer [2, B, N, H, C], converted to its dtype.

    Rows past the index's slots are padding and not written; slots past the rows must be -1. Captured in a CUDA graph it
    reads rows and slots anew at each replay.

    Args:
        k_THC, v_THC: any strides, channels adjacent.
        k_scale, v_scale: float32 scalars on the device, of an fp8 cache: what is stored is the number divided by it,
            saturating. None is 1.
    """
    if kv_layer.is_cuda:
        store(
            k_THC,
            v_THC,
            kv_layer,
            index.slot_mapping,
            second_offset=kv_layer.stride(0),
            first_scale=k_scale,
            second_scale=v_scale,
        )
        return
    k_THC, v_THC = _written(k_THC, index), _written(v_THC, index)
    _store(
        kv_layer,
        torch.cat((quantize(k_THC, k_scale, kv_layer.dtype), quantize(v_THC, v_scale, kv_layer.dtype))),
        index.tokens,
    )


def store_latent(
    kv_layer: Tensor, kv_c_TC: Tensor, k_pe_TR: Tensor, index: WriteIndex, *, scale: Tensor | None = None
) -> None:
    """Writes the new tokens' latents, each followed by its rotary part, into one layer [1, B, N, 1, C + R].

    Otherwise as `store_kv`, with one scale for both.
    """
    if kv_layer.is_cuda:
        store(
            kv_c_TC.unsqueeze(1),
            k_pe_TR.unsqueeze(1),
            kv_layer,
            index.slot_mapping,
            second_offset=kv_c_TC.shape[1],
            first_scale=scale,
            second_scale=scale,
        )
        return
    latents = torch.cat((_written(kv_c_TC, index), _written(k_pe_TR, index)), dim=-1)
    _store(kv_layer, quantize(latents, scale, kv_layer.dtype), index.tokens)


def gather_tokens(
    kv_layer: Tensor,
    tokens: TokenIndex | TokenRanges,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Copies tokens out of one layer: [K, S, H, C], strided as suits attention.

    Reads these tokens and no others, not even the rest of their blocks.

    Args:
        out: contiguous memory to use, [S, C] of MLA or [K, S, H, C]; the numbers become of its dtype.
        dtype: of what is returned where no `out` is given; None: as the cache.
        scale, v_scale: float32 scalars on the device that an fp8 cache's numbers are multiplied by when they become of
            another dtype: keys or latents by `scale`, values by `v_scale`. None is 1.
    """
    num_k, _, block_size, num_heads, channels = kv_layer.shape
    shape_KSHC = (num_k, len(tokens), num_heads, channels)
    if kv_layer.is_cuda:
        if out is None:
            out = kv_layer.new_empty(shape_KSHC, dtype=dtype or kv_layer.dtype)
        out_KSHC = out.view(shape_KSHC)
        if isinstance(tokens, TokenIndex):
            gather_slots(kv_layer, tokens.slots(kv_layer), out_KSHC=out_KSHC, scale=scale, v_scale=v_scale)
        else:
            gather_ranges(
                kv_layer,
                tokens.block_table,
                tokens.start_loc,
                tokens.first_position,
                tokens.num_tokens,
                out_KSHC=out_KSHC,
                scale=scale,
                v_scale=v_scale,
            )
        return out_KSHC
    index = tokens if isinstance(tokens, TokenIndex) else tokens.index(block_size)
    wanted = out.dtype if out is not None else dtype or kv_layer.dtype
    if wanted == kv_layer.dtype and not is_fp8(kv_layer):
        return _gather(kv_layer, index, out=out)
    gathered_KSHC = _gather(_as_bytes(kv_layer), index).view(kv_layer.dtype)
    scales = (scale, v_scale)
    converted = torch.stack([dequantize(gathered_KSHC[k], scales[k], wanted) for k in range(num_k)])
    return converted if out is None else out.view(shape_KSHC).copy_(converted)


def _gather(kv_layer: Tensor, index: TokenIndex, *, out: Tensor | None = None) -> Tensor:
    num_k, _, _, num_heads, channels = kv_layer.shape
    if out is not None:
        table, rows = index.runs(kv_layer, heads_first=False)
        torch.index_select(table, 0, rows, out=out.view(-1, table.shape[1]))
        return out.view(num_k, -1, num_heads, channels)
    table, rows = index.runs(kv_layer, heads_first=True)
    gathered = table.index_select(0, rows)
    if table.shape[1] == channels and num_heads > 1:
        return gathered.view(num_k, num_heads, -1, channels).transpose(1, 2)
    return gathered.view(num_k, -1, num_heads, channels)


def _written(values: Tensor, index: WriteIndex) -> Tensor:
    """The rows that have a slot."""
    return values[: len(index.slot_mapping)] if index.rows is None else values[index.rows]


def _store(kv_layer: Tensor, values: Tensor, tokens: TokenIndex) -> None:
    # Index operations on a CPU know no fp8.
    table, rows = tokens.runs(_as_bytes(kv_layer), heads_first=False)
    table.index_copy_(0, rows, _as_bytes(values).reshape(-1, table.shape[1]))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if is_fp8(tensor) else tensor
