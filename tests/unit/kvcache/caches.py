"""Caches full of random bytes, of every layout, for tests that compare kernels with their twins."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KV_DTYPE_BYTES, KVCacheShape, KVCacheSpec, KVKind

NUM_LAYERS = 2
layouts = st.sampled_from(tuple(KVCacheLayout))
block_sizes = st.sampled_from((1, 3, 4, 16))
dtypes = st.sampled_from(tuple(KV_DTYPE_BYTES))


def spec_of(layout: KVCacheLayout, dtype: str, *, head_dim: int = 8, num_kv_heads: int = 3) -> KVCacheSpec:
    """A spec of the kind that the layout is for."""
    if layout in MLA_LAYOUTS:
        return KVCacheSpec(KVKind.MLA, NUM_LAYERS, 1, 3 * head_dim, dtype)
    return KVCacheSpec(KVKind.GQA, NUM_LAYERS, num_kv_heads, head_dim, dtype)


def new_cache(spec: KVCacheSpec, layout: KVCacheLayout, block_size: int, num_blocks: int) -> PagedKVCache:
    """A cache on the CPU of random bytes, so that some numbers are infinite or NaN."""
    cache = PagedKVCache(spec, KVCacheShape(layout, block_size, num_blocks))
    cache.memory.copy_(torch.from_numpy(np.random.default_rng(0).integers(0, 256, cache.size_bytes, dtype=np.uint8)))
    return cache


def copy_of(cache: PagedKVCache, device: str) -> PagedKVCache:
    copied = PagedKVCache(cache.spec, cache.shape, device)
    copied.memory.copy_(cache.memory)
    return copied


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)
