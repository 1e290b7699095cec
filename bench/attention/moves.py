"""The cache's own moves against a plain copy: new tokens stored, context gathered, segments gathered and scattered."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kvcache.access import gather_tokens, store_kv
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.tokens import TokenRanges, WriteIndex
from baton.kvcache.wire.gather_scatter import gather_to_wire, scatter_from_wire
from bench.attention.figures import Work, moved_row
from bench.attention.measure import Ceilings, microseconds
from bench.table import Row

SPEC = KVCacheSpec(KVKind.GQA, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
TOKENS = 8192
BLOCK_SIZE = 16
LAYOUTS = (KVCacheLayout.NHD, KVCacheLayout.HND, KVCacheLayout.BLNHC)
GOAL = 0.8


def run(machine: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    for layout in LAYOUTS:
        progress(f"attention: the cache's moves, {layout.label}")
        cache = PagedKVCache(SPEC, KVCacheShape(layout, BLOCK_SIZE, TOKENS // BLOCK_SIZE), "cuda")
        cache.storage.normal_()
        blocks = torch.randperm(cache.shape.num_blocks)
        yield from _wire(cache, blocks, machine)
        yield _store(cache, blocks, machine)
        yield _gather(cache, blocks, machine)


def _wire(cache: PagedKVCache, blocks: Tensor, machine: Ceilings) -> Iterator[Row]:
    """A whole cache as one segment: 1 GB."""
    payload = torch.full((TOKENS * SPEC.bytes_per_token,), 0xFF, dtype=torch.uint8, device="cuda")
    where: dict[str, Any] = {
        "block_ids": blocks.to("cuda"),
        "block_ids_cpu": blocks,
        "token_start": 0,
        "token_stop": TOKENS,
        "layers": range(SPEC.num_layers),
        "heads": range(SPEC.num_kv_heads),
    }
    size = f"{TOKENS} tokens, 32 layers, {cache.shape.layout.label}"
    before = cache.storage.clone()
    gather_us = microseconds([partial(gather_to_wire, cache, out=payload, **where)])
    cache.storage.zero_()
    scatter_us = microseconds([partial(scatter_from_wire, cache, payload=payload, **where)])
    if not torch.equal(cache.storage, before):
        raise RuntimeError(f"what was gathered and scattered differs: {size}")
    for name, us in (("gather to wire", gather_us), ("scatter from wire", scatter_us)):
        yield moved_row(Work(name, size, 2 * payload.numel(), 0), us, GOAL, machine)


def _store(cache: PagedKVCache, blocks: Tensor, machine: Ceilings) -> Row:
    k, v = (
        torch.randn(TOKENS, SPEC.num_kv_heads, SPEC.head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    index = WriteIndex(slots.to("cuda"), BLOCK_SIZE)
    us = microseconds([partial(store_kv, cache.layer(layer), k, v, index) for layer in range(SPEC.num_layers)])
    stored = cache.view[-1, 0][blocks.to("cuda")].flatten(0, 1)
    if not torch.equal(stored, k):
        raise RuntimeError(f"what was stored differs: {cache.shape.layout.label}")
    num_bytes = 2 * TOKENS * SPEC.bytes_per_token_layer
    return moved_row(Work("store", f"{TOKENS} tokens, {cache.shape.layout.label}", num_bytes, 0), us, GOAL, machine)


def _gather(cache: PagedKVCache, blocks: Tensor, machine: Ceilings) -> Row:
    table, zero = blocks.to("cuda", torch.int32)[None], torch.zeros(1, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
    tokens = TokenRanges(table, starts, zero, num_tokens=TOKENS)
    out = torch.empty(2, TOKENS, SPEC.num_kv_heads, SPEC.head_dim, dtype=torch.bfloat16, device="cuda")
    us = microseconds([partial(gather_tokens, cache.layer(layer), tokens, out=out) for layer in range(SPEC.num_layers)])
    if not torch.equal(out[0], cache.view[-1, 0][blocks.to("cuda")].flatten(0, 1)):
        raise RuntimeError(f"what was gathered differs: {cache.shape.layout.label}")
    num_bytes = 2 * TOKENS * SPEC.bytes_per_token_layer
    return moved_row(Work("gather", f"{TOKENS} tokens, {cache.shape.layout.label}", num_bytes, 0), us, GOAL, machine)
