"""Blocks are copied and swapped whole, in all layers, and nothing else moves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InternalError
from baton.kvcache.block_ops import copy_blocks, swap_blocks
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.kernels.blocks import copy
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.device import DEVICE
from tests.unit.kvcache.caches import block_sizes, copy_of, dtypes, layouts, new_cache, spec_of

ON_GPU = DEVICE == "cuda"


def a_cache(
    layout: KVCacheLayout, *, dtype: str = "bfloat16", block_size: int = 4, num_blocks: int = 9
) -> PagedKVCache:
    return new_cache(spec_of(layout, dtype), layout, block_size, num_blocks)


def host_cache(cache: PagedKVCache) -> PagedKVCache:
    """An empty cache of the same shape in host memory, as a node keeps next to its GPU's cache."""
    return PagedKVCache(cache.spec, cache.shape, pinned=ON_GPU)


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.label)
@pytest.mark.parametrize(
    "src_to_dst", [{0: [3, 8], 5: [1]}, torch.tensor([[0, 3], [5, 1], [0, 8]])], ids=["map", "pairs"]
)
def test_copies_equal_their_source(
    layout: KVCacheLayout, src_to_dst: Mapping[int, Sequence[int]] | torch.Tensor
) -> None:
    before = a_cache(layout)
    caches = [copy_of(before, DEVICE) for _ in range(2)]
    copy_blocks(caches, src_to_dst)
    expected = before.by_block[:, [0, 5, 2, 0, 4, 5, 6, 7, 0]]
    for cache in caches:
        assert torch.equal(cache.by_block.cpu(), expected)


def test_the_index_of_blocks_is_copied_and_swapped_with_them() -> None:
    spec = spec_of(KVCacheLayout.NHD, "bfloat16")
    spec = replace(spec, index=KVCacheSpec(KVKind.MLA, 2, 1, 5, "float32"))
    cache, other = (PagedKVCache(spec, KVCacheShape(KVCacheLayout.NHD, 4, 9)) for _ in range(2))
    for part in cache.blockwise:
        part.view.copy_(torch.arange(part.view.numel()).view(part.view.shape))
    before = [part.by_block.clone() for part in cache.blockwise]
    swap_blocks(cache, other, {2: 1})
    copy_blocks([cache], {0: [3, 8], 5: [1]})
    for part, swapped, old in zip(cache.blockwise, other.blockwise, before, strict=True):
        assert torch.equal(part.by_block, old[:, [0, 5, 2, 0, 4, 5, 6, 7, 0]])
        assert torch.equal(swapped.by_block[:, 1], old[:, 2])
        assert not swapped.by_block[:, [0, *range(2, 9)]].any()


@settings(max_examples=20, deadline=None)
@given(layouts, dtypes, block_sizes, st.permutations(range(9)), st.permutations(range(9)), st.integers(1, 9))
def test_the_kernel_copies_blocks_as_indexing_does(
    layout: KVCacheLayout, dtype: str, block_size: int, sources: list[int], targets: list[int], count: int
) -> None:
    source = a_cache(layout, dtype=dtype, block_size=block_size)
    target = PagedKVCache(source.spec, source.shape)
    on_device = copy_of(target, DEVICE)
    target.by_block[:, targets[:count]] = source.by_block[:, sources[:count]]
    pairs = torch.tensor([sources[:count], targets[:count]], device=DEVICE).T.contiguous()
    copy(copy_of(source, DEVICE).by_block, on_device.by_block, pairs, num_programs=5)
    assert torch.equal(on_device.memory.cpu(), target.memory)


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.label)
@pytest.mark.parametrize("src_to_dst", [{2: 7, 3: 8, 6: 0}, {0: 1, 1: 2, 2: 3}, {4: 4}], ids=str)
def test_blocks_go_to_the_host_and_come_back(layout: KVCacheLayout, src_to_dst: dict[int, int]) -> None:
    cache = copy_of(a_cache(layout), DEVICE)
    before = cache.memory.clone()
    host = host_cache(cache)
    stream = torch.cuda.Stream() if ON_GPU else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    swap_blocks(cache, host, src_to_dst, stream=stream)
    if stream is not None:
        stream.synchronize()
    sources, targets = list(src_to_dst), list(src_to_dst.values())
    expected = torch.zeros_like(host.by_block)
    expected[:, targets] = before.view_as(cache.by_block).cpu()[:, sources]
    assert torch.equal(host.by_block, expected)
    cache.memory.zero_()
    swap_blocks(host, cache, {target: source for source, target in src_to_dst.items()})
    assert torch.equal(cache.by_block[:, sources].cpu(), expected[:, targets])
    assert int((cache.by_block != 0).any(dim=2).any(dim=0).sum()) == len(sources)


def test_large_adjacent_blocks_take_the_copy_engine_to_the_same_place() -> None:
    layout = KVCacheLayout.BLNHC
    source = new_cache(spec_of(layout, "float32", head_dim=128, num_kv_heads=8), layout, 32, 8)
    cache, host = copy_of(source, DEVICE), host_cache(source)
    swap_blocks(cache, host, {0: 2, 1: 3, 2: 4, 3: 5, 7: 0})
    if ON_GPU:
        torch.cuda.synchronize()
    assert torch.equal(host.by_block[:, [2, 3, 4, 5, 0]], source.by_block[:, [0, 1, 2, 3, 7]])
    assert not host.by_block[:, [1, 6, 7]].any()


@pytest.mark.parametrize("src_to_dst", [{0: [9]}, {-1: [2]}, {0: [2], 1: [2]}, {0: [1], 1: [2]}], ids=str)
def test_a_wrong_pair_copies_nothing(src_to_dst: dict[int, list[int]]) -> None:
    cache = copy_of(a_cache(KVCacheLayout.HND), DEVICE)
    before = cache.memory.clone()
    with pytest.raises(InternalError) as error:
        copy_blocks([cache], src_to_dst)
    assert error.value.field == "src_to_dst"
    if -1 in src_to_dst or [9] in src_to_dst.values():
        with pytest.raises(InternalError):
            swap_blocks(cache, host_cache(cache), src_to_dst)
    assert torch.equal(cache.memory, before)


@pytest.mark.parametrize(
    "other",
    [
        a_cache(KVCacheLayout.NHD),
        a_cache(KVCacheLayout.HND, block_size=8),
        a_cache(KVCacheLayout.HND, dtype="float16"),
    ],
    ids=["layout", "block size", "dtype"],
)
def test_blocks_of_another_form_are_refused(other: PagedKVCache) -> None:
    with pytest.raises(InternalError) as error:
        swap_blocks(a_cache(KVCacheLayout.HND), other, {0: 1})
    assert error.value.field == "target"


def test_no_pairs_move_nothing() -> None:
    cache = copy_of(a_cache(KVCacheLayout.NHD), DEVICE)
    before = cache.memory.clone()
    copy_blocks([cache], {})
    swap_blocks(cache, host_cache(cache), torch.from_numpy(np.empty((0, 2), dtype=np.int64)))
    assert torch.equal(cache.memory, before)
