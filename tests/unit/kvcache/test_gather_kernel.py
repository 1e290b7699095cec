"""The kernel that reads tokens out of a layer equals its twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kvcache.access import gather_tokens
from baton.kvcache.kernels.gather import gather_ranges, gather_slots
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.tokens import TokenIndex, TokenRanges
from tests.device import DEVICE
from tests.unit.kvcache.caches import as_bytes, block_sizes, copy_of, dtypes, layouts, new_cache, spec_of

NUM_BLOCKS = 7
SCALE, V_SCALE = torch.tensor(0.3), torch.tensor(7.0)


def same(given_KSHC: Tensor, expected_KSHC: Tensor) -> bool:
    return torch.equal(as_bytes(given_KSHC), as_bytes(expected_KSHC))


@settings(max_examples=20, deadline=None)
@given(layouts, block_sizes, dtypes, st.data())
def test_tokens_by_slot_keep_their_bytes(
    layout: KVCacheLayout, block_size: int, dtype: str, draw: st.DataObject
) -> None:
    cache = new_cache(spec_of(layout, dtype), layout, block_size, NUM_BLOCKS)
    slots = torch.tensor(draw.draw(st.lists(st.integers(0, NUM_BLOCKS * block_size - 1), min_size=1, max_size=12)))
    blocks, offsets = slots // block_size, slots % block_size
    expected = gather_tokens(cache.layer(1), TokenIndex(blocks.numpy(), offsets.numpy()))
    gathered = torch.empty(expected.shape, dtype=expected.dtype, device=DEVICE)
    gather_slots(copy_of(cache, DEVICE).layer(1), slots.to(DEVICE), out_KSHC=gathered)
    assert same(gathered, expected)


@settings(max_examples=20, deadline=None)
@given(layouts, block_sizes, st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_tokens_by_range_keep_their_bytes(
    layout: KVCacheLayout, block_size: int, lens: list[int], draw: st.DataObject
) -> None:
    cache = new_cache(spec_of(layout, "float16"), layout, block_size, NUM_BLOCKS)
    firsts = [draw.draw(st.integers(0, 5)) for _ in lens]
    table = torch.randint(NUM_BLOCKS, (len(lens), 16), dtype=torch.int32)
    start_loc = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    ranges = TokenRanges(table, start_loc, torch.tensor(firsts, dtype=torch.int32), num_tokens=sum(lens))
    positions = [
        (request, first + i)
        for request, (first, length) in enumerate(zip(firsts, lens, strict=True))
        for i in range(length)
    ]
    requests_S, positions_S = torch.tensor(positions, dtype=torch.int64).view(-1, 2).T
    expected = cache.layer(0)[:, table[requests_S, positions_S // block_size].long(), positions_S % block_size]
    assert same(gather_tokens(cache.layer(0), ranges), expected)
    num_k, _, _, num_heads, channels = cache.layer(0).shape
    gathered = torch.empty(num_k, sum(lens), num_heads, channels, dtype=torch.float16, device=DEVICE)
    gather_ranges(
        copy_of(cache, DEVICE).layer(0),
        table.to(DEVICE),
        start_loc.to(DEVICE),
        ranges.first_position.to(DEVICE),
        sum(lens),
        out_KSHC=gathered,
    )
    assert same(gathered, expected)


@pytest.mark.parametrize("layout", [KVCacheLayout.HND, KVCacheLayout.LBNC], ids=lambda layout: layout.label)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_converted_to_the_numbers_that_it_represents(layout: KVCacheLayout, dtype: str) -> None:
    cache = new_cache(spec_of(layout, dtype), layout, 16, 16)
    slots = torch.randperm(256)
    tokens = TokenIndex(slots.numpy() // 16, slots.numpy() % 16)
    expected = gather_tokens(cache.layer(0), tokens, dtype=torch.float32, scale=SCALE, v_scale=V_SCALE)
    gathered = torch.empty(expected.shape, device=DEVICE)
    gather_slots(
        copy_of(cache, DEVICE).layer(0),
        slots.to(DEVICE),
        out_KSHC=gathered,
        scale=SCALE.to(DEVICE),
        v_scale=V_SCALE.to(DEVICE),
    )
    torch.testing.assert_close(gathered.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    by_hand = cache.layer(0)[0].flatten(0, 1)[slots].float() * 0.3
    torch.testing.assert_close(expected[0], by_hand, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", [KVCacheLayout.NHD, KVCacheLayout.BLHNC], ids=lambda layout: layout.label)
def test_memory_may_be_given(layout: KVCacheLayout) -> None:
    cache = new_cache(spec_of(layout, "float8_e4m3fn"), layout, 4, NUM_BLOCKS)
    slots = torch.tensor([3, 20, 1])
    tokens = TokenIndex(slots.numpy() // 4, slots.numpy() % 4)
    expected = gather_tokens(cache.layer(1), tokens, dtype=torch.bfloat16, scale=SCALE)
    out = torch.zeros_like(expected, memory_format=torch.contiguous_format)
    assert gather_tokens(cache.layer(1), tokens, out=out, scale=SCALE).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
