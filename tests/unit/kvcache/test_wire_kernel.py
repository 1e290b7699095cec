"""The kernel between cache and wire moves the bytes that its twin moves, and digests them on the way."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from baton.kvcache.wire.digest import COLUMNS, constant_term, digest
from baton.kvcache.wire.gather_scatter import gather_to_wire, scatter_from_wire
from baton.kvcache.wire.kernels.digest import CONSTANTS
from baton.kvcache.wire.kernels.gather_scatter import gather_and_digest, move
from baton.kvcache.wire.places import places_of
from tests.device import DEVICE
from tests.unit.kvcache.caches import NUM_LAYERS, block_sizes, copy_of, dtypes, layouts, new_cache, spec_of

NUM_BLOCKS = 9
SENTINEL = 0xA5


@st.composite
def _transfers(draw: st.DrawFn) -> tuple[PagedKVCache, torch.Tensor, tuple[int, int], range, range]:
    """A cache, a request's blocks, and the ranges to move."""
    layout = draw(layouts)
    head_dim = draw(st.sampled_from((2, 5, 16, 64)))
    spec = spec_of(layout, draw(dtypes), head_dim=head_dim)
    if spec.kind is KVKind.GQA and draw(st.booleans()):
        spec = replace(spec, kind=KVKind.STATE)
    cache = new_cache(spec, layout, draw(block_sizes), NUM_BLOCKS)
    block_ids = torch.tensor(draw(st.permutations(range(NUM_BLOCKS))))[: draw(st.integers(1, 6))]
    held = len(block_ids) * cache.shape.block_size
    start = draw(st.integers(0, held - 1))
    stop = draw(st.integers(start + 1, held))
    first_layer, first_head = (draw(st.integers(0, size - 1)) for size in (NUM_LAYERS, cache.spec.num_kv_heads))
    layers = range(first_layer, draw(st.integers(first_layer + 1, NUM_LAYERS)))
    heads = range(first_head, draw(st.integers(first_head + 1, cache.spec.num_kv_heads)))
    return cache, block_ids, (start, stop), layers, heads


def _payload_bytes(cache: PagedKVCache, num_tokens: int, layers: range, heads: range) -> int:
    spec = cache.spec
    return num_tokens * len(layers) * spec.kv_factor * len(heads) * spec.head_dim * spec.itemsize


@settings(max_examples=20, deadline=None)
@given(_transfers(), st.sampled_from((0, 16, 4, 2, 1)))
def test_gathered_and_scattered_bytes_equal_the_twins(
    transfer: tuple[PagedKVCache, torch.Tensor, tuple[int, int], range, range], offset: int
) -> None:
    cache, block_ids, (start, stop), layers, heads = transfer
    size = _payload_bytes(cache, stop - start, layers, heads)
    expected = torch.empty(size, dtype=torch.uint8)
    gather_to_wire(
        cache, block_ids=block_ids, token_start=start, token_stop=stop, layers=layers, heads=heads, out=expected
    )
    on_device = copy_of(cache, DEVICE)
    memory = torch.full((offset + size + 16,), SENTINEL, dtype=torch.uint8, device=DEVICE)
    payload = memory[offset : offset + size]
    places = places_of(on_device, start, stop, layers, heads)
    move(on_device.memory, payload, block_ids.to(DEVICE), places, to_cache=False)
    assert torch.equal(payload.cpu(), expected)
    assert (memory[:offset] == SENTINEL).all()
    assert (memory[offset + size :] == SENTINEL).all()
    assert torch.equal(on_device.memory.cpu(), cache.memory)

    arrived = expected.flip(0)
    scatter_from_wire(
        cache, block_ids=block_ids, token_start=start, token_stop=stop, layers=layers, heads=heads, payload=arrived
    )
    payload.copy_(arrived)
    move(on_device.memory, payload, block_ids.to(DEVICE), places, to_cache=True)
    assert torch.equal(on_device.memory.cpu(), cache.memory)


@settings(max_examples=6, deadline=None)
@given(_transfers())
def test_the_digest_on_the_way_is_the_payloads(
    transfer: tuple[PagedKVCache, torch.Tensor, tuple[int, int], range, range],
) -> None:
    cache, block_ids, (start, stop), layers, heads = transfer
    on_device = copy_of(cache, DEVICE)
    places = places_of(on_device, start, stop, layers, heads)
    payload = torch.zeros(_payload_bytes(cache, stop - start, layers, heads), dtype=torch.uint8, device=DEVICE)
    if not places.can_be_digested(on_device.memory, payload):
        return
    taken = torch.full((), -1, dtype=torch.int64, device=DEVICE)
    gather_and_digest(
        on_device.memory,
        payload,
        block_ids.to(DEVICE),
        places,
        columns=COLUMNS,
        constant_term=constant_term(payload.numel()),
        digest_out=taken,
    )
    moved = torch.zeros_like(payload)
    move(on_device.memory, moved, block_ids.to(DEVICE), places, to_cache=False)
    assert torch.equal(payload, moved)
    assert int(taken) % 2**64 == digest(payload.cpu())


@pytest.mark.parametrize(("num_tokens", "held_rows"), [(181, 256), (405, 256), (405, 8)])
def test_the_digest_of_many_tiles_is_the_payloads(
    num_tokens: int, held_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than programs, and a last tile that is not full; one group of programs and two; more rows than a
    program holds at a time."""
    monkeypatch.setitem(CONSTANTS, "HELD_ROWS", held_rows)
    layout = KVCacheLayout.HND
    num_blocks = num_tokens // 16 + 2
    spec = spec_of(layout, "bfloat16", head_dim=64, num_kv_heads=4)
    cache = copy_of(new_cache(spec, layout, 16, num_blocks), DEVICE)
    payload = torch.zeros(num_tokens * cache.spec.bytes_per_token, dtype=torch.uint8, device=DEVICE)
    taken = torch.zeros((), dtype=torch.int64, device=DEVICE)
    gather_and_digest(
        cache.memory,
        payload,
        torch.randperm(num_blocks).to(DEVICE),
        places_of(cache, 3, 3 + num_tokens, range(NUM_LAYERS), range(4)),
        columns=COLUMNS,
        constant_term=constant_term(payload.numel()),
        digest_out=taken,
    )
    assert int(taken) % 2**64 == digest(payload.cpu())


def test_a_block_outside_of_the_cache_is_neither_read_nor_written() -> None:
    """Block ids on a GPU cannot be checked without waiting for it."""
    cache = copy_of(new_cache(spec_of(KVCacheLayout.NHD, "bfloat16"), KVCacheLayout.NHD, 4, NUM_BLOCKS), DEVICE)
    before = cache.memory.clone()
    places = places_of(cache, 0, 8, range(NUM_LAYERS), range(3))
    payload = torch.full((8 * cache.spec.bytes_per_token,), SENTINEL, dtype=torch.uint8, device=DEVICE)
    for wrong in ([NUM_BLOCKS, -1], [-5, 2**40]):
        block_ids = torch.tensor(wrong, device=DEVICE)
        move(cache.memory, payload, block_ids, places, to_cache=True)
        assert torch.equal(cache.memory, before)
        move(cache.memory, payload.clone(), block_ids, places, to_cache=False)
    move(cache.memory, payload, torch.tensor([NUM_BLOCKS, -1], device=DEVICE), places, to_cache=False)
    assert not payload.any()
