"""One allocation and one logical view for every layout."""

from dataclasses import replace

import pytest
import torch

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind


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


WHOLE = KVCacheSpec(
    KVKind.GQA,
    num_layers=2,
    num_kv_heads=3,
    head_dim=4,
    dtype="bfloat16",
    index=KVCacheSpec(KVKind.MLA, num_layers=2, num_kv_heads=1, head_dim=5, dtype="float32"),
    state=KVCacheSpec(KVKind.STATE, num_layers=4, num_kv_heads=6, head_dim=7, dtype="float32"),
)


def test_the_index_has_the_blocks_of_kv_and_the_state_has_slots() -> None:
    cache = PagedKVCache(WHOLE, KVCacheShape(KVCacheLayout.NHD, 5, 7, state_slots=3))
    kv, index, state = cache.parts
    assert kv is cache
    assert [part.view.shape for part in cache.parts] == [(2, 2, 7, 5, 3, 4), (2, 1, 7, 5, 1, 5), (4, 1, 3, 1, 6, 7)]
    assert sum(part.size_bytes for part in (kv, index)) == 35 * WHOLE.bytes_per_token
    assert state.size_bytes == 3 * WHOLE.bytes_per_slot


def test_layers_that_draft_may_have_an_index_in_the_same_blocks() -> None:
    draft = KVCacheSpec(KVKind.MLA, 1, 1, 9, "bfloat16", index=KVCacheSpec(KVKind.MLA, 1, 1, 5, "float32"))
    spec = replace(WHOLE, draft=draft)
    assert spec.part_layers == (range(2), range(2, 4), range(4, 8), range(8, 9), range(9, 10))
    cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.NHD, 5, 7, state_slots=3))
    assert [part.spec for part in cache.parts] == list(spec.parts)
    assert [part.view.shape[2] for part in cache.blockwise] == [7] * 4
    assert sum(part.size_bytes for part in cache.blockwise) == 35 * spec.bytes_per_token


def test_layers_of_all_parts_are_numbered_in_one_row() -> None:
    assert WHOLE.part_layers == (range(2), range(2, 4), range(4, 8))
    assert replace(WHOLE, index=None, state=None).part_layers == (range(2),)
