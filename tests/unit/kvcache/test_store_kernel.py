"""The kernel that writes new tokens leaves the cache as its twin does, number for number."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvcache.access import store_kv, store_latent
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.kernels.store import store
from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.tokens import WriteIndex
from tests.device import DEVICE
from tests.unit.kvcache.caches import block_sizes, copy_of, new_cache, spec_of

NUM_BLOCKS = 7
CACHE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
K_SCALE, V_SCALE = torch.tensor(0.3), torch.tensor(0.007)


def a_batch(num_rows: int, channels: int) -> torch.Tensor:
    """Queries, keys and values of three heads each side by side, as a projection leaves them; some out of any range."""
    qkv = torch.randn(num_rows, 9, channels, generator=torch.Generator().manual_seed(0)) * 3
    qkv[:, 3, 0] = torch.nan
    qkv[:, 3, 1] = 1e6
    qkv[:, 6, 2] = -1e6
    qkv[:, 6, 3] = 1e-3
    return qkv.to(torch.bfloat16)


def assert_same(stored: PagedKVCache, expected: PagedKVCache) -> None:
    """The hardware chooses which NaN is stored."""
    torch.testing.assert_close(stored.view.cpu().float(), expected.view.float(), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(GQA_LAYOUTS), block_sizes, st.sampled_from(CACHE_DTYPES), st.data())
def test_keys_and_values_end_up_where_the_twin_puts_them(
    layout: KVCacheLayout, block_size: int, dtype: str, draw: st.DataObject
) -> None:
    expected = new_cache(spec_of(layout, dtype), layout, block_size, NUM_BLOCKS)
    stored = copy_of(expected, DEVICE)
    slots = draw.draw(st.lists(st.integers(0, NUM_BLOCKS * block_size - 1), min_size=1, max_size=9, unique=True))
    slots = draw.draw(st.permutations([*slots, -1, -1]))
    padding = draw.draw(st.integers(0, 2))
    qkv = a_batch(len(slots) + padding, 8)
    slot_mapping = torch.tensor(slots)
    store_kv(
        expected.layer(1),
        qkv[:, 3:6],
        qkv[:, 6:],
        WriteIndex(slot_mapping, block_size),
        k_scale=K_SCALE,
        v_scale=V_SCALE,
    )
    on_device = qkv.to(DEVICE)
    store(
        on_device[:, 3:6],
        on_device[:, 6:],
        stored.layer(1),
        slot_mapping.to(DEVICE),
        second_offset=stored.layer(1).stride(0),
        first_scale=K_SCALE.to(DEVICE),
        second_scale=V_SCALE.to(DEVICE),
    )
    assert_same(stored, expected)


@pytest.mark.parametrize("layout", MLA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_latents_and_rotary_parts_end_up_where_the_twin_puts_them(layout: KVCacheLayout, dtype: str) -> None:
    expected = new_cache(spec_of(layout, dtype), layout, 4, NUM_BLOCKS)
    stored = copy_of(expected, DEVICE)
    kv_c_TL, k_pe_TR = a_batch(6, 16)[:, 3], a_batch(6, 8)[:, 3]
    slot_mapping = torch.tensor([5, -1, 27, 0, 13])
    store_latent(expected.layer(0), kv_c_TL, k_pe_TR, WriteIndex(slot_mapping, 4), scale=K_SCALE)
    store(
        kv_c_TL.to(DEVICE).unsqueeze(1),
        k_pe_TR.to(DEVICE).unsqueeze(1),
        stored.layer(0),
        slot_mapping.to(DEVICE),
        second_offset=16,
        first_scale=K_SCALE.to(DEVICE),
        second_scale=K_SCALE.to(DEVICE),
    )
    assert_same(stored, expected)


def test_slots_past_the_rows_are_left_alone() -> None:
    """As in a captured graph whose slots lie in a longer buffer."""
    cache = new_cache(spec_of(KVCacheLayout.NHD, "bfloat16"), KVCacheLayout.NHD, 4, NUM_BLOCKS)
    stored = copy_of(cache, DEVICE)
    k_THC, v_THC = (part.to(DEVICE) for part in (a_batch(2, 8)[:, :3], a_batch(2, 8)[:, 3:6]))
    slots = torch.tensor([3, 9, 1, 2], device=DEVICE)
    store(k_THC, v_THC, stored.layer(0), slots, second_offset=stored.layer(0).stride(0))
    untouched = [slot for slot in range(NUM_BLOCKS * 4) if slot not in (3, 9)]
    before, after = cache.layer(0).flatten(1, 2), stored.layer(0).flatten(1, 2).cpu()
    assert torch.equal(after[:, untouched].view(torch.int16), before[:, untouched].view(torch.int16))
    assert torch.equal(after[0, [3, 9]].view(torch.int16), k_THC.cpu().view(torch.int16))
