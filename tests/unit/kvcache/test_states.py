"""Copies of whole states within the cache of a model's recurrent layers."""

from collections.abc import Sequence

import pytest
import torch

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.kernels.blocks import copy
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.states import copy_states
from tests.device import DEVICE

STATE = KVCacheSpec(KVKind.STATE, num_layers=3, num_kv_heads=2, head_dim=5, dtype="float32")
SPEC = KVCacheSpec(KVKind.GQA, num_layers=1, num_kv_heads=2, head_dim=4, dtype="bfloat16", state=STATE)
LAYOUTS = (KVCacheLayout.NHD, KVCacheLayout.HND, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNC)


def states(layout: KVCacheLayout = KVCacheLayout.NHD, device: str = "cpu") -> PagedKVCache:
    state = PagedKVCache(SPEC, KVCacheShape(layout, block_size=4, num_blocks=2, state_slots=6), device).state
    assert state is not None
    state.view.copy_(torch.randn(state.view.shape, generator=torch.Generator().manual_seed(1)))
    return state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pairs_state_is_copied_in_all_layers_and_no_other_slot_changes(layout: KVCacheLayout) -> None:
    cache = states(layout)
    before_LKSNHC = cache.view.clone()
    copy_states(cache, [(0, 4), (5, 1), (0, 3)])
    expected = before_LKSNHC[:, :, [0, 5, 2, 0, 0, 5]]
    assert torch.equal(cache.view, expected)


def test_no_pairs_copy_nothing() -> None:
    cache = states()
    before = cache.view.clone()
    copy_states(cache, [])
    assert torch.equal(cache.view, before)


@pytest.mark.parametrize("pairs", [[(0, 6)], [(-1, 0)], [(0, 2), (1, 2)], [(0, 1), (1, 2)], [(3, 3)]])
def test_slots_that_are_not_there_or_clash_are_an_error(pairs: Sequence[tuple[int, int]]) -> None:
    cache = states()
    before = cache.view.clone()
    with pytest.raises(InternalError):
        copy_states(cache, pairs)
    assert torch.equal(cache.view, before)


@pytest.mark.parametrize("layout", [KVCacheLayout.NHD, KVCacheLayout.BLNHC])
def test_the_kernel_of_gpus_copies_the_same(layout: KVCacheLayout) -> None:
    pairs = [(0, 4), (5, 1)]
    twin, cache = states(layout), states(layout, DEVICE)
    copy_states(twin, pairs)
    copy(cache.by_block, cache.by_block, torch.tensor(pairs, device=DEVICE))
    assert torch.equal(cache.view.cpu(), twin.view)
