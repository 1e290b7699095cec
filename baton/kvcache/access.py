"""Reads and writes tokens of the paged cache by strides alone, and so serves every layout and block size.

On a GPU each function launches one Triton kernel, on a CPU it moves the runs of `baton.kvcache.tokens`. Whole requests
are moved by `baton.kvcache.wire.gather_scatter`. Legend as in `baton.kvcache.tokens`.
"""

import torch
from torch import Tensor

from baton.kvcache.fp8 import dequantize, is_fp8, quantize
from baton.kvcache.kernels.gather import gather_ranges, gather_slots
from baton.kvcache.kernels.store import store
from baton.kvcache.tokens import TokenIndex, TokenRanges, WriteIndex


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

    Rows past the index's slots are padding and are not written; slots past the rows must be -1. A captured CUDA graph
    reads rows and slots anew at each replay.

    Args:
        k_THC, v_THC: any strides, channels adjacent.
        k_scale, v_scale: float32 scalars on the device, for an fp8 cache, which stores numbers divided by their scale,
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

    Reads only these tokens, not the rest of their blocks.

    Args:
        out: contiguous memory for the result, [S, C] for MLA or [K, S, H, C]; numbers are converted to its dtype.
        dtype: the result's, where no `out` is given; None: the cache's.
        scale, v_scale: float32 scalars on the device, for an fp8 cache that is converted to another dtype: keys or
            latents are multiplied by `scale`, values by `v_scale`. None is 1.
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
    """The values of the rows that have a slot."""
    return values[: len(index.slot_mapping)] if index.rows is None else values[index.rows]


def _store(kv_layer: Tensor, values: Tensor, tokens: TokenIndex) -> None:
    # torch has no index operations for fp8 on a CPU.
    table, rows = tokens.runs(_as_bytes(kv_layer), heads_first=False)
    table.index_copy_(0, rows, _as_bytes(values).reshape(-1, table.shape[1]))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if is_fp8(tensor) else tensor
