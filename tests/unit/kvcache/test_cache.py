"""One allocation and one logical view for every layout."""

from dataclasses import replace

import pytest
import torch

from kvcache.cache import PagedKVCache
from kvcache.layout import KVCacheLayout
from kvcache.spec import KVCacheShape, KVCacheSpec, KVKind


def spec_for(layout: KVCacheLayout) -> KVCacheSpec:
    mla = layout in (KVCacheLayout.LBNC, KVCacheLayout.BLNC)
    return KVCacheSpec(KVKind.MLA, 2, 1, 6, "float32") if mla else KVCacheSpec(KVKind.GQA, 2, 3, 4, "bfloat16")


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.label)
def test_the_view_has_logical_axes_and_the_memory_the_layouts_order(layout: KVCacheLayout) -> None:
    spec = spec_for(layout)
    cache = PagedKVCache(spec, KVCacheShape(layout, 5, 7))
    assert cache.view.shape == (2, spec.kv_factor, 7, 5, spec.num_kv_heads, spec.head_dim)
    assert cache.view.permute(layout.memory_order).is_contiguous()
    assert cache.storage.is_contiguous()
    assert cache.size_bytes == 7 * 5 * spec.bytes_per_token
    assert not cache.storage.any()


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.label)
def test_a_layer_is_a_view_of_the_cache(layout: KVCacheLayout) -> None:
    cache = PagedKVCache(spec_for(layout), KVCacheShape(layout, 5, 7))
    cache.layer(1)[0, 6, 4].fill_(3.0)
    assert torch.equal(cache.view[1, 0, 6, 4], torch.full_like(cache.view[1, 0, 6, 4], 3.0))
    assert int((cache.storage != 0).sum()) == cache.spec.num_kv_heads * cache.spec.head_dim


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.label)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_adjacent_bytes_of_a_block_are_the_whole_block_or_one_part(layout: KVCacheLayout, dtype: str) -> None:
    cache = PagedKVCache(replace(spec_for(layout), dtype=dtype), KVCacheShape(layout, 5, 7))
    cache.by_block[:, 3].fill_(0x3C)
    written = cache.view.view(torch.uint8) != 0
    assert written[:, :, 3].all()
    assert int(written.sum()) == 5 * cache.spec.bytes_per_token
    assert cache.by_block.shape[0] == (1 if layout.label.startswith("BL") else 2 * cache.spec.kv_factor)
