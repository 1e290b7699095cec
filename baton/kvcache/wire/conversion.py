"""Gathers a request's tokens from the paged cache to wire order in another dtype, for a node that keeps KV in 8 bits.

The converted numbers equal, bit for bit, the numbers that the other cache would have stored itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.fp8 import FP8, quantize
from baton.kvcache.spec import ALIGN_TOKENS, DTYPE_BYTES, KVCacheSpec
from baton.kvcache.wire.digest import digest_on_device
from baton.kvcache.wire.gather_scatter import gather_to_wire
from baton.kvcache.wire.kernels import conversion as kernels
from baton.kvcache.wire.places import check_places

# The CPU gathers this much at a time, so that it is still in a near cache when it is converted.
_TILE_BYTES = 1 << 19


@dataclass(frozen=True, eq=False)
class Converter:
    """The dtype and scales of one cache's payloads; made by `open_converter`.

    Attributes:
        spec: the cache's, in the payload's dtype.
        scales_LK: for a payload in 8 bits, float32, on the cache's device; None is 1.
    """

    spec: KVCacheSpec
    scales_LK: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.spec.dtype]


def open_converter(cache: PagedKVCache, dtype: str, scales: Sequence[float] = ()) -> Converter:
    """Makes a converter. Slow on a GPU: it compiles the kernel and waits, on its own stream, so any thread may call it.

    Args:
        dtype: the payload's; any dtype of a cache.
        scales: for a dtype of 8 bits: for each layer one for keys and one for values, or one for latents. Empty: all
            are 1.
    """
    spec = cache.spec
    assert spec.dtype in DTYPE_BYTES, "a cache in 8 bits is not converted"
    assert not scales or (TORCH_DTYPES[dtype] in FP8 and len(scales) == spec.num_layers * spec.kv_factor)
    scales_LK = torch.tensor(scales, dtype=torch.float32).view(spec.num_layers, spec.kv_factor) if scales else None
    if not cache.storage.is_cuda:
        return Converter(replace(spec, dtype=dtype), scales_LK)
    with torch.cuda.device(cache.storage.device), torch.cuda.stream(torch.cuda.Stream()):
        on_device = None if scales_LK is None else scales_LK.to(cache.storage.device)
        converter = Converter(replace(spec, dtype=dtype), on_device)
        _compile(cache, converter)
        torch.cuda.current_stream().synchronize()
    return converter


def gather_converted(
    cache: PagedKVCache,
    converter: Converter,
    *,
    block_ids: Tensor,
    token_start: int,
    token_stop: int,
    layers: range,
    heads: range,
    out: Tensor,
    block_ids_cpu: Tensor | None = None,
    digest_out: Tensor | None = None,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Gathers like `gather_to_wire`, in the converter's dtype, to which `out` must be aligned.

    Args:
        between: on a CPU, called after each tile, so that callers can keep other work going.
    """
    places = check_places(
        cache, block_ids, block_ids_cpu, token_start, token_stop, layers, heads, out.numel(), spec=converter.spec
    )
    if cache.storage.is_cuda:
        kernels.gather_converted(
            cache.storage.view(-1),
            out.view(converter.dtype),
            block_ids.to(cache.storage.device, non_blocking=True),
            places,
            scales_LK=_of_layers(converter, layers),
        )
    else:
        _gather_on_cpu(cache, converter, block_ids, (token_start, token_stop), layers, heads, out, between)
    if digest_out is not None:
        digest_on_device(out, out=digest_out)


def _gather_on_cpu(
    cache: PagedKVCache,
    converter: Converter,
    block_ids: Tensor,
    tokens: tuple[int, int],
    layers: range,
    heads: range,
    out: Tensor,
    between: Callable[[], object],
) -> None:
    """Gathers and converts tile by tile, each of one layer."""
    spec, (token_start, token_stop) = cache.spec, tokens
    shape = (len(layers), spec.kv_factor, token_stop - token_start, len(heads), spec.head_dim)
    out_LKTHC = out.view(converter.dtype).view(shape)
    for (number, layer), (start, stop) in product(enumerate(layers), _tiles(spec, tokens, num_heads=len(heads))):
        tile_KTHC = torch.empty((spec.kv_factor, stop - start, *shape[3:]), dtype=cache.storage.dtype)
        gather_to_wire(
            cache,
            block_ids=block_ids,
            token_start=start,
            token_stop=stop,
            layers=range(layer, layer + 1),
            heads=heads,
            out=tile_KTHC.view(-1).view(torch.uint8),
        )
        for k, values_THC in enumerate(tile_KTHC):
            scale = None if converter.scales_LK is None else converter.scales_LK[layer, k]
            converted_THC = quantize(values_THC, scale, converter.dtype)
            out_LKTHC[number, k, start - token_start : stop - token_start] = converted_THC
        between()


def _tiles(spec: KVCacheSpec, tokens: tuple[int, int], *, num_heads: int) -> Iterator[tuple[int, int]]:
    """Cuts a token range into ranges whose KV of one layer fits into a tile."""
    per_token = spec.bytes_per_token_layer // spec.num_kv_heads * num_heads
    tokens_each = max(1, _TILE_BYTES // per_token)
    start, token_stop = tokens
    while start < token_stop:
        stop = start + tokens_each
        aligned = stop // ALIGN_TOKENS * ALIGN_TOKENS
        stop = min(token_stop, aligned if aligned > start else stop)
        yield start, stop
        start = stop


def _of_layers(converter: Converter, layers: range) -> Tensor | None:
    scales_LK = converter.scales_LK
    return None if scales_LK is None else scales_LK[layers.start : layers.stop : layers.step]


def _compile(cache: PagedKVCache, converter: Converter) -> None:
    """Compiles the kernel by one run, for a block outside of the cache."""
    device, spec = cache.storage.device, cache.spec
    payload = torch.zeros(converter.spec.bytes_per_token_layer, dtype=torch.uint8, device=device)
    nowhere, nowhere_cpu = torch.full((1,), -1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64)
    gather_converted(
        cache,
        converter,
        block_ids=nowhere,
        block_ids_cpu=nowhere_cpu,
        token_start=0,
        token_stop=1,
        layers=range(1),
        heads=range(spec.num_kv_heads),
        out=payload,
    )
