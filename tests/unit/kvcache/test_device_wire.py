"""A cache's prepared moves equal those of `baton.kvcache.wire.gather_scatter` for any memory."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.wire.digest import digest
from baton.kvcache.wire.gather_scatter import gather_to_wire, scatter_from_wire
from baton.kvcache.wire.prepared import DeviceWire
from tests.device import DEVICE
from tests.unit.kvcache.caches import NUM_LAYERS, block_sizes, copy_of, dtypes, layouts, new_cache, spec_of

NUM_BLOCKS = 9
SENTINEL = 0xA5


@settings(max_examples=12, deadline=None)
@given(layouts, dtypes, block_sizes, st.sampled_from((5, 16)), st.sampled_from((0, 16, 3)), st.data())
def test_prepared_moves_equal_their_twins(
    layout: KVCacheLayout, dtype: str, block_size: int, head_dim: int, offset: int, data: st.DataObject
) -> None:
    cache = new_cache(spec_of(layout, dtype, head_dim=head_dim), layout, block_size, NUM_BLOCKS)
    block_ids = torch.tensor(data.draw(st.permutations(range(NUM_BLOCKS))))
    start = data.draw(st.integers(0, 6 * block_size - 1))
    layers = data.draw(st.sampled_from((range(NUM_LAYERS), range(1, 2), range(0, NUM_LAYERS, 2))))
    heads = data.draw(st.sampled_from((range(cache.spec.num_kv_heads), range(cache.spec.num_kv_heads - 1, 1 << 30))))
    where: dict[str, Any] = {
        "token_start": start,
        "token_stop": data.draw(st.integers(start + 1, 6 * block_size)),
        "layers": layers,
        "heads": range(heads.start, min(heads.stop, cache.spec.num_kv_heads)),
    }
    expected, taken = _twin(cache, block_ids, where)
    # Longer memory than needed, and more blocks; then again with the memory that the first call has written.
    on_device = copy_of(cache, DEVICE)
    wire = DeviceWire(on_device)
    blocks = block_ids.to(DEVICE)
    for _ in range(2):
        slot = torch.full((offset + len(expected) + 40,), SENTINEL, dtype=torch.uint8, device=DEVICE)
        out, left = slot[offset:], torch.zeros(11, dtype=torch.uint8, device=DEVICE)
        size = wire.gather(block_ids=blocks, out=out, digest_out=left[3:], digest_add=7, **where)
        assert size == len(expected)
        assert torch.equal(out[:size].cpu(), expected)
        assert (slot[:offset] == SENTINEL).all()
        assert (out[size:] == SENTINEL).all()
        assert left.cpu().numpy().tobytes() == bytes(3) + ((taken + 7) % 2**64).to_bytes(8, "little")
        wire.digest(out, size, out=left[:8], digest_add=2**64 - 1)
        assert left[:8].cpu().numpy().tobytes() == ((taken - 1) % 2**64).to_bytes(8, "little")
        assert wire.gather(block_ids=blocks, out=out.fill_(0), **where) == size
        assert torch.equal(out[:size].cpu(), expected)
        start, stop, given = where["token_start"], where["token_stop"], {"layers": layers, "heads": where["heads"]}
        gather = wire.gathers(block_ids=blocks, num_tokens=stop - start, out=out.fill_(0), **given)
        gather(start, left[3:])
        assert torch.equal(out[:size].cpu(), expected)
        assert left[3:].cpu().numpy().tobytes() == taken.to_bytes(8, "little")
    payload = expected.flip(0)
    scatter_from_wire(cache, block_ids=block_ids, payload=payload, **where)
    out[:size].copy_(payload)
    wire.scatter(block_ids=blocks, payload=out, **where)
    assert torch.equal(on_device.memory.cpu(), cache.memory)


def _twin(cache: PagedKVCache, block_ids: Tensor, where: dict[str, Any]) -> tuple[Tensor, int]:
    spec = cache.spec
    num_tokens, num_heads = where["token_stop"] - where["token_start"], len(where["heads"])
    size = num_tokens * len(where["layers"]) * spec.kv_factor * num_heads * spec.head_dim * spec.itemsize
    payload = torch.empty(size, dtype=torch.uint8)
    gather_to_wire(cache, block_ids=block_ids, out=payload, **where)
    return payload, digest(payload)


def test_layers_may_lie_apart() -> None:
    layout = KVCacheLayout.HND
    cache = new_cache(KVCacheSpec(KVKind.GQA, 5, 2, 16, "bfloat16"), layout, 4, NUM_BLOCKS)
    where: dict[str, Any] = {"token_start": 3, "token_stop": 17, "layers": range(1, 5, 2), "heads": range(1, 2)}
    block_ids = torch.tensor([8, 0, 3, 2, 5])
    expected, taken = _twin(cache, block_ids, where)
    on_device, left = copy_of(cache, DEVICE), torch.zeros((), dtype=torch.int64, device=DEVICE)
    wire, out = DeviceWire(on_device), torch.zeros(len(expected), dtype=torch.uint8, device=DEVICE)
    wire.gather(block_ids=block_ids.to(DEVICE), out=out, digest_out=left, **where)
    assert torch.equal(out.cpu(), expected)
    assert int(left) % 2**64 == taken
    on_device.memory.zero_()
    wire.scatter(block_ids=block_ids.to(DEVICE), payload=out, **where)
    again = torch.zeros_like(out)
    wire.gather(block_ids=block_ids.to(DEVICE), out=again, **where)
    assert torch.equal(again, out)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_stop": 9},
        {"token_start": -1},
        {"token_start": 4},
        {"layers": range(1, NUM_LAYERS + 1)},
        {"layers": range(-1, 1)},
        {"layers": range(0)},
        {"heads": range(4)},
        {"heads": range(0, 3, 2)},
        {"heads": range(-1, 2)},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    cache = copy_of(new_cache(spec_of(KVCacheLayout.NHD, "bfloat16"), KVCacheLayout.NHD, 4, NUM_BLOCKS), DEVICE)
    before = cache.memory.clone()
    wire = DeviceWire(cache)
    memory = torch.full((1 << 14,), SENTINEL, dtype=torch.uint8, device=DEVICE)
    where: dict[str, Any] = {
        "block_ids": torch.tensor([3, 1], device=DEVICE),
        "token_start": 0,
        "token_stop": 4,
        "layers": range(NUM_LAYERS),
        "heads": range(3),
        **wrong,
    }
    with pytest.raises(InternalError):
        wire.gather(out=memory, **where)
    with pytest.raises(InternalError):
        wire.scatter(payload=memory, **where)
    assert (memory == SENTINEL).all()
    assert torch.equal(cache.memory, before)


def test_too_short_memory_is_refused() -> None:
    cache = copy_of(new_cache(spec_of(KVCacheLayout.HND, "float16"), KVCacheLayout.HND, 4, NUM_BLOCKS), DEVICE)
    where: dict[str, Any] = {"token_start": 0, "token_stop": 4, "layers": range(1), "heads": range(3)}
    payload = torch.zeros(4 * cache.spec.bytes_per_token_layer - 1, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(InternalError):
        DeviceWire(cache).gather(block_ids=torch.tensor([1], device=DEVICE), out=payload, **where)


def test_blocks_outside_of_the_cache_are_neither_read_nor_written() -> None:
    spec = KVCacheSpec(KVKind.GQA, NUM_LAYERS, 2, 16, "bfloat16")
    cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.NHD, 4, NUM_BLOCKS), DEVICE)
    cache.memory.fill_(SENTINEL)
    wire = DeviceWire(cache)
    payload = torch.full((8 * spec.bytes_per_token,), 1, dtype=torch.uint8, device=DEVICE)
    where: dict[str, Any] = {"token_start": 0, "token_stop": 8, "layers": range(NUM_LAYERS), "heads": range(2)}
    nowhere = torch.tensor([-1, NUM_BLOCKS], device=DEVICE)
    wire.scatter(block_ids=nowhere, payload=payload, **where)
    assert (cache.memory == SENTINEL).all()
    wire.gather(block_ids=nowhere, out=payload, **where)
    assert not payload.any()
