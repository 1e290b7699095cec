"""Entries of a cache on a GPU: copied by the GPU to page-locked memory and back, into another layout and block size."""

from dataclasses import replace

import pytest
import torch

from baton.core.kv_entries import ENTRY_TOKENS, EntryState
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.cuda import CudaMover
from kvtransfer.movers.mover import Mover
from tests.conformance.kv import as_bytes, tokens_of
from tests.unit.kvtransfer.offloading import World, blocks_of, fill_randomly, keys_of

pytestmark = pytest.mark.gpu

LLAMA = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=576, dtype="bfloat16")
INDEX = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=128, dtype="float32")
SPECS = {
    "gqa": LLAMA,
    "fp8": replace(LLAMA, dtype="float8_e4m3fn"),
    "mla": DEEPSEEK,
    "sparse": replace(DEEPSEEK, index=INDEX),
}
ENTRIES = 7


def gpu_mover(cache: PagedKVCache, _: object) -> Mover:
    return CudaMover(cache)


@pytest.mark.parametrize("to_gpu", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_entries_of_a_gpu_come_back_bit_for_bit_on_a_gpu_or_cpu(name: str, to_gpu: bool) -> None:
    spec = SPECS[name]
    layouts = [KVCacheLayout.HND, KVCacheLayout.BLNHC]
    if spec.kind is KVKind.MLA:
        layouts = [KVCacheLayout.LBNC, KVCacheLayout.BLNC]
    source_cache = PagedKVCache(spec, KVCacheShape(layouts[0], 16, 80), "cuda")
    target_cache = PagedKVCache(spec, KVCacheShape(layouts[1], 128, 12), "cuda" if to_gpu else "cpu")
    on_cpu = PagedKVCache(spec, source_cache.shape)
    fill_randomly(on_cpu)
    for part, filled in zip(source_cache.parts, on_cpu.parts, strict=True):
        part.storage.copy_(filled.storage)
    world = World(spec)
    source = world.user(source_cache, gpu_mover)
    target = world.user(target_cache, gpu_mover if to_gpu else CpuMover)
    keys = keys_of(ENTRIES)
    there, here = blocks_of(source_cache, ENTRIES, 1), blocks_of(target_cache, ENTRIES, 2)
    assert source.save(keys, there) == ENTRIES
    for part in source_cache.parts:
        part.storage.zero_()
    torch.cuda.synchronize()
    assert target.load(keys, here) == ENTRIES
    for part, wanted in zip(target_cache.parts, on_cpu.parts, strict=True):
        loaded = tokens_of(part, here, ENTRIES * ENTRY_TOKENS).cpu()
        assert torch.equal(as_bytes(loaded), as_bytes(tokens_of(wanted, there, ENTRIES * ENTRY_TOKENS)))
    world.check_nothing_is_left()
    world.tiers.close()


def test_a_damaged_entry_ends_a_load_while_later_entries_are_copied() -> None:
    count, damaged = 18, 11
    cache = PagedKVCache(LLAMA, KVCacheShape(KVCacheLayout.HND, 16, 160), "cuda")
    on_cpu = PagedKVCache(LLAMA, cache.shape)
    fill_randomly(on_cpu)
    cache.storage.copy_(on_cpu.storage)
    world = World(LLAMA, places=count)
    user = world.user(cache, gpu_mover)
    keys, there, here = keys_of(count), tuple(range(72)), tuple(range(80, 152))
    assert user.save(keys, there) == count
    assert user.load(keys, here) == count
    loaded = tokens_of(cache, here, count * ENTRY_TOKENS).cpu()
    assert torch.equal(as_bytes(loaded), as_bytes(tokens_of(on_cpu, there, count * ENTRY_TOKENS)))
    world.tiers._host._places[keys[damaged].block.digest].tensor[1000] ^= 4
    cache.storage[...] = 0
    torch.cuda.synchronize()
    assert user.load(keys, here) == damaged
    loaded = tokens_of(cache, here, damaged * ENTRY_TOKENS).cpu()
    assert torch.equal(as_bytes(loaded), as_bytes(tokens_of(on_cpu, there, damaged * ENTRY_TOKENS)))
    assert not tokens_of(cache, here, (damaged + 1) * ENTRY_TOKENS)[:, :, damaged * ENTRY_TOKENS :].any()
    assert world.tiers.counters().damaged == 1
    world.check_nothing_is_left()
    world.tiers.close()


@pytest.mark.parametrize("head_dim", [200, 40_000])
def test_a_state_of_a_gpu_comes_back_bit_for_bit(head_dim: int) -> None:
    spec = replace(LLAMA, state=KVCacheSpec(KVKind.STATE, 4, 8, head_dim, "float32"))
    cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.HND, 16, 80, state_slots=4), "cuda")
    assert cache.state is not None
    cache.state.storage.copy_(torch.randn(cache.state.storage.shape))
    wanted = cache.state.view[:, :, 1].clone()
    torch.cuda.synchronize()
    world = World(spec, places=64)
    user = world.user(cache, gpu_mover)
    (key,) = keys_of(1)
    saved = user.begin_save((), (), EntryState(key, 1))
    assert world.result(saved) == 1
    loaded = user.begin_load((), (), state=EntryState(key, 2))
    assert world.result(loaded) == 1
    torch.cuda.synchronize()
    assert torch.equal(cache.state.view[:, :, 2], wanted)
    world.check_nothing_is_left()
    world.tiers.close()
