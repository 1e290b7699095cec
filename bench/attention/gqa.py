"""Decodes and prefills over a key/value cache, 32 query heads on 8 of 128 channels, by every backend that serves them,
and prefills by torch with cuDNN."""

from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attention.backend import AttentionNeeds
from attention.metadata import CommonAttentionMetadata
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.selection import BACKENDS, BackendClass, fitting_backends, reasons_against
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from bench.attention.batches import Lengths, attend, checked_rows, keys_of, make_cache, make_common
from bench.attention.figures import MAX_ERROR, Goal, Work, default_row, rows_of
from bench.attention.measure import Ceilings, microseconds, relative_error, turns
from bench.attention.rivals import CUDNN, cudnn_us
from bench.table import Row

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
LAYER = AttentionParameters(scale=SCALE)
OURS = "TRITON_ATTN"
# The second is for backends that read no smaller blocks.
BLOCK_SIZES = (16, 256)
ROW_BYTES = NUM_HEADS * HEAD_DIM * 2

DECODES = (
    Lengths(1, 1, 1023),
    Lengths(1, 1, 32767),
    Lengths(32, 1, 1023),
    Lengths(32, 1, 4095),
    Lengths(64, 1, 4095),
    Lengths(256, 1, 2047),
    Lengths(16, 1, 32767),
)
PREFILLS = (Lengths(2, 8192, 0), Lengths(8, 2048, 0), Lengths(1, 2048, 6144))
DEFAULT_SHARE = 0.97


def run(platform: Platform, machine: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    for lengths in (*DECODES, *PREFILLS):
        work = work_of(lengths)
        progress(f"attention: {work.name}, {work.size}")
        us_by_size = {size: measure(lengths, size, platform, progress) for size in BLOCK_SIZES}
        us_of = dict(ChainMap(*us_by_size.values()))
        yield from rows_of(work, us_of | measure_others(lengths), OURS, goals_of(lengths), machine)
        for size, measured in us_by_size.items():
            there = replace(work, size=f"{work.size}, blocks of {size}")
            yield default_row(there, measured, default_of(lengths, size, platform), DEFAULT_SHARE)


def work_of(lengths: Lengths) -> Work:
    kv_bytes = lengths.num_reqs * lengths.seq_len * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    decode = lengths.query_len == 1
    context = f" over {lengths.context_len} of context" if lengths.context_len else ""
    return Work(
        "GQA decode" if decode else "GQA prefill",
        f"B {lengths.num_reqs}, context {lengths.seq_len}"
        if decode
        else f"{lengths.num_reqs} x {lengths.query_len}{context}",
        kv_bytes + 2 * lengths.num_tokens * ROW_BYTES,
        4 * lengths.pairs * NUM_HEADS * HEAD_DIM,
    )


def goals_of(lengths: Lengths) -> tuple[Goal, ...]:
    if lengths.query_len > 1:
        return Goal("FLASHINFER", 0.75), Goal("FLASH_ATTN", 1.0)
    large = lengths.num_reqs >= 32 and lengths.seq_len >= 4096
    return (Goal("FLASHINFER", 0.9 if large else 0.8),)


def needs_of(lengths: Lengths, block_size: int) -> AttentionNeeds:
    return AttentionNeeds(
        kind=KVKind.GQA,
        device="cuda",
        dtype="bfloat16",
        head_size=HEAD_DIM,
        block_size=block_size,
        layout=KVCacheLayout.NHD,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        max_num_reqs=lengths.num_reqs,
        max_model_len=lengths.seq_len,
        max_num_tokens=lengths.num_tokens,
        layers={"layer": LAYER},
    )


def default_of(lengths: Lengths, block_size: int, platform: Platform) -> str:
    needs = needs_of(lengths, block_size)
    return str(fitting_backends(needs, platform)[0].capabilities.name)


def measure(lengths: Lengths, block_size: int, platform: Platform, progress: Callable[[str], None]) -> dict[str, float]:
    """Microseconds by backend. Backends with wrong results are reported and left out."""
    us_of: dict[str, float] = {}
    for backend in BACKENDS:
        name = backend.capabilities.name
        needs = needs_of(lengths, block_size)
        if name == "BLOCKSPARSE_FLASH_ATTN" or reasons_against(backend.capabilities, needs, platform):
            continue
        us, error = measure_backend(backend, needs, lengths, platform)
        if error < MAX_ERROR:
            us_of[name] = us
        else:
            progress(f"attention: {name} is wrong by {error:.1e}: {work_of(lengths).size}, blocks of {block_size}")
    return us_of


def measure_others(lengths: Lengths) -> dict[str, float]:
    """Microseconds of kernels that are not backends of ours."""
    if lengths.query_len == 1 or lengths.context_len:
        return {}
    us = cudnn_us(
        lengths, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM, scale=SCALE
    )
    return {CUDNN: us}


def measure_backend(
    backend: BackendClass, needs: AttentionNeeds, lengths: Lengths, platform: Platform
) -> tuple[float, float]:
    """(microseconds of one layer's forward, relative error)."""
    common = make_common(lengths, needs.block_size)
    cache = _cache(lengths, needs.block_size)
    made = backend(needs, platform, context_workspace_tokens=1)
    decode = lengths.query_len == 1
    metadata = made.builder.build_for_cudagraph_capture(common) if decode else made.builder.build(0, common)
    q = torch.randn(lengths.num_tokens, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (None, None) if decode else _new_tokens(cache, common, lengths)
    out = torch.full_like(q, torch.nan)

    def call(layer: int) -> None:
        made.forward(q, k, v, cache.layer(layer), metadata, layer=LAYER, out=out)

    call(0)
    error = 0.0
    for request, rows in checked_rows(lengths):
        expected = attend(q[rows], *keys_of(cache.layer(0), common, request, lengths.seq_len), scale=SCALE)
        error = max(error, relative_error(out[rows], expected))
    return microseconds([partial(call, layer) for layer in range(cache.spec.num_layers)]), error


def _cache(lengths: Lengths, block_size: int) -> PagedKVCache:
    """The caches of as many layers as take turns."""
    layer_bytes = lengths.num_reqs * lengths.seq_len * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    spec = KVCacheSpec(KVKind.GQA, turns(layer_bytes), NUM_KV_HEADS, HEAD_DIM, "bfloat16")
    return make_cache(spec, lengths, block_size, KVCacheLayout.NHD)


def _new_tokens(cache: PagedKVCache, common: CommonAttentionMetadata, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """The batch's own keys and values as a model has them, here copied from the cache."""
    kv = [keys_of(cache.layer(0), common, request, lengths.seq_len) for request in range(lengths.num_reqs)]
    k_THD, v_THD = (torch.cat([pair[which][lengths.context_len :] for pair in kv]) for which in range(2))
    return k_THD, v_THD
