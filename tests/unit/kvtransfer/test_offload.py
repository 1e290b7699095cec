"""Entries leave a cache for host memory and stores, and come back bit for bit, or not at all."""

import cProfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from baton.core.errors import ConfigError, DeadlineExceeded, InternalError
from baton.core.kv_entries import ENTRY_TOKENS, DroppedEntries, EntryBlocks, EntryKey, KeepTime, StoreChanges
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.movers.mover import SAVED_AT_ONCE
from kvtransfer.offload import SLOTS
from kvtransfer.offload_calls import DROP_LIMIT_S, FIND_LIMIT_S
from kvtransfer.offload_queue import STUCK_AFTER_S
from kvtransfer.offload_reads import PassingPlace
from kvtransfer.offload_tiers import PEER, EntryTiers
from kvtransfer.parts import parts_of
from kvtransfer.records import EntryCounters
from kvtransfer.segments import TRAILER_BYTES
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.store import StoreCounters
from tests.conformance.kv import DEADLINE_S, as_bytes, make_cache, tokens_of
from tests.conformance.late import Script, late
from tests.unit.kvtransfer.offloading import (
    LIMIT_S,
    SPEC,
    LoadedSequence,
    MemoryStore,
    World,
    blocks_of,
    fill_randomly,
    keys_of,
    transfer_settings,
)

GQA = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
MLA = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=6, dtype="bfloat16")
INDEX = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=3, dtype="float32")
STATE = KVCacheSpec(KVKind.STATE, num_layers=2, num_kv_heads=2, head_dim=5, dtype="float32")
SPECS = {
    "gqa": GQA,
    "fp8": replace(GQA, dtype="float8_e4m3fn"),
    "mla": MLA,
    "sparse": replace(MLA, index=INDEX),
    "gqa with index": replace(GQA, index=INDEX),
}
ENTRIES = 5
BLOCK_SIZES = [(16, 128), (128, 8), (48, 64)]
CASES = [
    (name, layouts, BLOCK_SIZES[number % 3])
    for name, spec in SPECS.items()
    for number, layouts in enumerate(product(GQA_LAYOUTS if spec.kind is KVKind.GQA else MLA_LAYOUTS, repeat=2))
]


def cache_of(
    spec: KVCacheSpec, layout: KVCacheLayout = KVCacheLayout.NHD, block_size: int = 16, entries: int = ENTRIES
) -> PagedKVCache:
    return make_cache(spec, layout, block_size, (entries + 2) * ENTRY_TOKENS)


def kv_of(cache: PagedKVCache, blocks: tuple[int, ...], entries: int) -> list[Tensor]:
    """The bytes of a sequence in every part of a cache."""
    return [as_bytes(tokens_of(part, blocks, entries * ENTRY_TOKENS)) for part in cache.parts]


def clone_of(cache: PagedKVCache) -> list[Tensor]:
    return [part.storage.clone().view(torch.uint8) for part in cache.parts]


def is_unchanged(cache: PagedKVCache, before: list[Tensor]) -> bool:
    return all(torch.equal(part.storage.view(torch.uint8), was) for part, was in zip(cache.parts, before, strict=True))


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(("name", "layouts", "sizes"), CASES)
def test_entries_come_back_bit_for_bit_into_another_layout_and_block_size(
    name: str, layouts: tuple[KVCacheLayout, KVCacheLayout], sizes: tuple[int, int]
) -> None:
    spec = SPECS[name]
    world = World(spec)
    movers = [late(Script(seed=seed)) for seed in range(2)]
    caches = [cache_of(spec, layout, size) for layout, size in zip(layouts, sizes, strict=True)]
    source, target = (world.user(cache, mover) for cache, mover in zip(caches, movers, strict=True))
    keys = keys_of(ENTRIES)
    there, here = blocks_of(source.cache, ENTRIES, 1), blocks_of(target.cache, ENTRIES, 2)
    fill_randomly(source.cache)
    fill_randomly(target.cache, seed=5)
    wanted = kv_of(source.cache, there, ENTRIES)
    before = clone_of(source.cache)
    assert source.save(keys, there) == ENTRIES
    assert is_unchanged(source.cache, before)
    source.cache.memory.zero_()  # the blocks are another request's now
    others = set(range(target.cache.shape.num_blocks)) - set(here)
    kept = [part.view[:, :, sorted(others)].clone() for part in target.cache.parts]
    assert target.load(keys, here) == ENTRIES
    assert equal(kv_of(target.cache, here, ENTRIES), wanted)
    for part, was in zip(target.cache.parts, kept, strict=True):
        assert torch.equal(as_bytes(part.view[:, :, sorted(others)]), as_bytes(was))
    world.check_nothing_is_left()


@pytest.mark.parametrize("name", SPECS)
def test_a_load_that_begins_within_a_sequence_leaves_the_tokens_before_it(name: str) -> None:
    spec = SPECS[name]
    world = World(spec)
    user = world.user(cache_of(spec, block_size=128))
    keys, blocks = keys_of(3), blocks_of(user.cache, 3, 1)
    fill_randomly(user.cache)
    user.save(keys, blocks)
    wanted = kv_of(user.cache, blocks, 3)
    for part in user.cache.parts:
        part.view[:, :, blocks[0], ENTRY_TOKENS:] = 0
        part.view[:, :, blocks[1]] = 0
    assert user.load(keys[1:], blocks) == 2
    assert equal(kv_of(user.cache, blocks, 3), wanted)


def test_what_is_there_is_not_saved_again() -> None:
    world = World()
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(4), blocks_of(user.cache, 4, 1)
    assert user.save(keys[:3], blocks) == 3
    assert user.save(keys, blocks) == 4
    assert world.tiers.counters().saved == 4
    assert world.find(keys) == 4
    assert world.find(keys_of(2, salt="another tenant")) == 0


@pytest.mark.parametrize("part", [0, 1])
def test_a_flipped_bit_anywhere_in_a_message_is_never_scattered(part: int) -> None:
    spec = replace(SPEC, index=replace(INDEX, num_layers=1, head_dim=1))
    world = World(spec)
    user = world.user(cache_of(spec, entries=1))
    (key,) = keys_of(1)
    blocks = blocks_of(user.cache, 1, 1)
    fill_randomly(user.cache)
    other = blocks_of(user.cache, 1, 2)
    start, size = world.layout.messages[part].start, world.layout.messages[part].size
    for number in range(size):
        assert user.save((key,), blocks) == 1
        before = clone_of(user.cache)
        world.tiers._host._places[key.block.digest].tensor[start + number] ^= 1 << number % 8
        assert user.load((key,), other) == 0
        if part == 0:  # the other part's message is whole, and may be scattered
            assert torch.equal(user.cache.storage.view(torch.uint8), before[0]), number
        assert user.cache.index is not None
        if part == 1:
            assert torch.equal(user.cache.index.storage.view(torch.uint8), before[1]), number
        assert world.find((key,)) == 0, "it is forgotten"
    assert size > TRAILER_BYTES
    assert world.tiers.counters().damaged == size
    world.check_nothing_is_left()


def test_another_entrys_bytes_in_the_right_place_are_refused() -> None:
    world = World()
    user = world.user(cache_of(SPEC))
    keys, others = keys_of(2), keys_of(2, seed=1)
    blocks = blocks_of(user.cache, 2, 1)
    fill_randomly(user.cache)
    for names in (keys, others):
        user.save(names, blocks)
    places = world.tiers._host._places
    for wrong in (keys[0], others[1]):  # of another position, and of another prefix
        places[keys[1].block.digest].tensor.copy_(places[wrong.block.digest].tensor)
        before = clone_of(user.cache)
        target = blocks_of(user.cache, 2, 3)
        assert user.load((keys[1],), target) == 0
        assert is_unchanged(user.cache, before)
        user.save(keys, blocks)
    assert world.tiers.counters().damaged == 2


def test_the_first_missing_or_damaged_entry_ends_a_load() -> None:
    world = World(places=16)
    user = world.user(cache_of(SPEC, entries=8))
    keys, blocks, target = keys_of(8), blocks_of(user.cache, 8, 1), blocks_of(user.cache, 8, 2)
    fill_randomly(user.cache)
    user.save(keys, blocks)
    world.tiers._host._places[keys[5].block.digest].tensor[0] ^= 1
    assert user.load(keys, target) == 5
    world.forget_host(keys[3:4])
    assert user.load(keys, target) == 3
    world.check_nothing_is_left()
    counters = world.tiers.counters()
    assert (counters.damaged, counters.failed, counters.loaded) == (1, 1, {"host": 8})
    assert (counters.saved, counters.entries) == (8, 6)
    assert counters.bytes == 6 * world.layout.entry_bytes


def test_more_entries_than_host_memory_has_room_for_leave_the_first_ones() -> None:
    world = World(places=3)
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(5), blocks_of(user.cache, 5, 1)
    fill_randomly(user.cache)
    wanted = kv_of(user.cache, blocks, 5)
    user.save(keys, blocks)
    found = world.find(keys)
    assert 0 < found <= 3
    target = blocks_of(user.cache, 5, 2)
    assert user.load(keys, target) == found
    assert equal(kv_of(user.cache, target, found), [part[:, :, : found * ENTRY_TOKENS] for part in wanted])
    world.check_nothing_is_left()


def test_two_loads_of_the_same_entries_at_once_both_get_them() -> None:
    world = World()
    user = world.user(cache_of(SPEC), late(Script(seed=3)))
    keys = keys_of(2)
    source, *targets = (blocks_of(user.cache, 7, 1)[start : start + 8] for start in (0, 8, 16))
    fill_randomly(user.cache)
    user.save(keys, source)
    wanted = kv_of(user.cache, source, 2)
    loads = [user.begin_load(keys, target) for target in targets]
    assert [world.result(load) for load in loads] == [2, 2]
    for target in targets:
        assert equal(kv_of(user.cache, target, 2), wanted)
    world.check_nothing_is_left()


def test_a_stopped_load_is_over_when_nothing_writes_to_its_blocks_any_more() -> None:
    script = Script(held=frozenset({"scatter"}))
    world = World()
    user = world.user(cache_of(SPEC), late(script))
    keys, blocks, target = keys_of(5), blocks_of(user.cache, 5, 1), blocks_of(user.cache, 5, 2)
    fill_randomly(user.cache)
    wanted = kv_of(user.cache, blocks, 5)
    user.save(keys, blocks)
    load = user.begin_load(keys, target)
    world.run_until(lambda: len(script.waiting()) == SLOTS)
    user.offloader.stop(load)
    world.run()
    assert not load.done()
    script.release_all()
    assert world.result(load) == SLOTS
    assert equal(kv_of(user.cache, target, SLOTS), [part[:, :, : SLOTS * ENTRY_TOKENS] for part in wanted])
    world.check_nothing_is_left()


def test_after_the_time_limit_no_entry_begins() -> None:
    script = Script(held=frozenset({"scatter"}))
    world = World()
    user = world.user(cache_of(SPEC), late(script))
    keys, blocks, target = keys_of(5), blocks_of(user.cache, 5, 1), blocks_of(user.cache, 5, 2)
    user.save(keys, blocks)
    load = user.begin_load(keys, target)
    world.run_until(lambda: len(script.waiting()) == SLOTS)
    world.clock.now_s += LIMIT_S
    script.release_all()
    assert world.result(load) == SLOTS
    assert user.begin_load(keys, target, timeout_s=0.0).done() is False
    world.run()
    assert user.offloader.in_flight == 0
    world.check_nothing_is_left()


def test_a_stopped_save_keeps_whole_entries_only() -> None:
    spec = SPECS["sparse"]
    script = Script(held=frozenset({"save"}))
    world = World(spec)
    user = world.user(cache_of(spec), late(script))
    keys, blocks, target = keys_of(5), blocks_of(user.cache, 5, 1), blocks_of(user.cache, 5, 2)
    fill_randomly(user.cache)
    save = user.begin_save(keys, blocks)
    while len(script.waiting()) < 3:  # an entry and a half
        user.offloader.step()
    user.offloader.stop(save)
    world.run()
    assert not save.done()
    script.release_all()
    kept = world.result(save)
    assert (kept, world.find(keys)) == (1, 1)
    assert user.load(keys, target) == 1
    world.check_nothing_is_left()


@pytest.mark.parametrize("by_root", [False, True])
def test_entries_that_are_dropped_while_they_are_saved_are_not_kept(by_root: bool) -> None:
    script = Script(held=frozenset({"save"}))
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC, entries=8), late(script))
    keys, others = keys_of(8), keys_of(1, salt="another tenant")
    save = user.begin_save(keys, blocks_of(user.cache, 8, 1))
    other = user.begin_save(others, blocks_of(user.cache, 1, 2))
    world.run_until(lambda: len(script.waiting()) == SLOTS)
    dropped: Future[None] = Future()
    dropped_of_root: Future[DroppedEntries] = Future()
    if by_root:
        user.offloader.drop_roots(frozenset({keys[0].root}), dropped_of_root)
    else:
        user.offloader.drop(keys, dropped)
    script.release_all()
    assert world.result(save) == 0
    assert world.result(other) == 1
    world.run_until(lambda: dropped.done() or dropped_of_root.done())
    world.settle()
    assert list(store.kept) == list(others)
    assert (world.find(keys), world.find(others)) == (0, 1)
    world.check_nothing_is_left()


def test_an_entry_that_is_dropped_while_it_is_saved_can_be_saved_again_at_once() -> None:
    script = Script(held=frozenset({"save"}))
    world = World()
    user = world.user(cache_of(SPEC), late(script))
    keys, blocks = keys_of(1), blocks_of(user.cache, 1, 1)
    saves = [user.begin_save(keys, blocks)]
    world.run_until(lambda: len(script.waiting()) == 1)
    user.offloader.drop(keys, Future())
    saves.append(user.begin_save(keys, blocks))
    world.run_until(lambda: len(script.waiting()) == 2)
    script.release_all()
    # The first save finds the second one's entry.
    assert [world.result(save) for save in saves] == [1, 1]
    assert world.tiers.counters().saved == 1
    assert world.find(keys) == 1
    world.check_nothing_is_left()


def test_blocks_that_do_not_exist_or_are_too_few_are_errors_and_leave_nothing() -> None:
    world = World()
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(2), blocks_of(user.cache, 2, 1)
    for begin in (user.begin_save, user.begin_load):
        with pytest.raises(InternalError, match="block"):
            world.result(begin(keys, (user.cache.shape.num_blocks,)))
    user.save(keys, blocks)
    world.check_nothing_is_left()


# ---- stores below host memory


def test_entries_are_written_behind_and_read_back_from_the_first_store_that_has_them() -> None:
    first, second = MemoryStore("first"), MemoryStore("second")
    world = World(stores=[first, second])
    user = world.user(cache_of(SPEC))
    keys, blocks, target = keys_of(5), blocks_of(user.cache, 5, 1), blocks_of(user.cache, 5, 2)
    fill_randomly(user.cache)
    wanted = kv_of(user.cache, blocks, 5)
    user.save(keys, blocks)
    assert set(first.kept) == set(second.kept) == set(keys)
    world.forget_host(keys[1:])
    del first.kept[keys[2]]
    assert world.find(keys) == 5
    load = user.begin_load(keys, target)
    assert world.result(load) == 5
    assert isinstance(load, LoadedSequence)
    assert load.sources == ("host", "first", "second", "first", "first")
    assert equal(kv_of(user.cache, target, 5), [part[:, :, : 5 * ENTRY_TOKENS] for part in wanted])
    counters = world.tiers.counters()
    assert counters.loaded == {"host": 1, "first": 3, "second": 1}
    assert counters.stores["second"].entries == 5
    world.check_nothing_is_left()


@pytest.mark.parametrize("drops", [False, True])
def test_an_entry_that_a_store_has_in_another_form_is_written_as_its_own_unless_it_is_dropped(*, drops: bool) -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(3), blocks_of(user.cache, 3, 1)
    user.save(keys, blocks)
    world.forget_host(keys)
    store.other_form.update(keys[:2])
    store.calls.clear()
    store.gate.clear()
    load = user.begin_load(keys, blocks_of(user.cache, 3, 2))
    world.run()
    future: Future[DroppedEntries] = Future()
    if drops:
        user.offloader.drop_roots(frozenset({keys[0].root}), future)
    store.gate.set()
    assert world.result(load) == (0 if drops else 3)
    world.settle()
    assert store.calls.count("put") == (0 if drops else 2)
    assert set(store.kept) == (set() if drops else set(keys))
    assert store.other_form == (set(keys[:2]) if drops else set())
    world.check_nothing_is_left()


def test_what_leaves_host_memory_is_below_it_while_a_store_has_it_and_gone_after_that() -> None:
    store = MemoryStore()
    world = World(places=2, stores=[store])
    user = world.user(cache_of(SPEC, entries=8))
    keys, blocks = keys_of(6), blocks_of(user.cache, 6, 1)
    digests = [key.block.digest for key in keys]
    user.save(keys[:2], blocks)
    world.settle()
    assert world.tiers.take_changes() is None
    others = [keys_of(1, seed=seed) for seed in range(1, 3)]
    user.save(others[0], blocks)
    world.settle()
    assert world.tiers.take_changes() == StoreChanges(below=(digests[1],))
    del store.kept[keys[0]]
    user.save(others[1], blocks)
    world.settle()
    assert world.tiers.take_changes() == StoreChanges(gone=(digests[0],))
    # A store that loses what host memory does not have.
    store.lost.append(digests[1])
    del store.kept[keys[1]]
    assert world.tiers.take_changes() == StoreChanges(gone=(digests[1],))
    store.lost.append(others[1][0].block.digest)
    assert world.tiers.take_changes() is None, "host memory has it still"
    world.check_nothing_is_left()


def test_what_a_store_has_at_the_start_is_told_once_but_for_what_was_dropped_meanwhile() -> None:
    store = MemoryStore(lists=True)
    mine, dropped = keys_of(3), keys_of(2, salt="dropped")
    store.kept |= dict.fromkeys((*mine, *dropped), b"")
    store.gate.clear()
    world = World(places=4, stores=[store])
    user = world.user(cache_of(SPEC, entries=4))
    assert world.tiers.take_changes() is None
    future: Future[DroppedEntries] = Future()
    user.offloader.drop_roots(frozenset({dropped[0].root}), future)
    store.gate.set()
    world.result(future)
    assert world.changes() == StoreChanges(found=mine)
    assert world.tiers.take_changes() is None
    world.check_nothing_is_left()


class SlowLister(MemoryStore):
    """A store that ends its listing once `gate` is open."""

    def found(self, most: int) -> Sequence[EntryKey]:
        listed = tuple(self.kept)[:most]
        self._call("found")
        return listed

    def lose(self, key: EntryKey) -> None:
        del self.kept[key]
        self.lost.append(key.block.digest)


def test_what_a_store_loses_while_it_lists_its_entries_is_not_told() -> None:
    store = SlowLister()
    keys = keys_of(4)
    store.kept |= dict.fromkeys(keys, b"")
    store.gate.clear()
    world = World(places=4, stores=[store])
    world.user(cache_of(SPEC, entries=4))
    world.run_until(lambda: "found" in store.calls)
    store.lose(keys[3])
    assert world.tiers.take_changes() == StoreChanges(gone=(keys[3].block.digest,))
    store.gate.set()
    listing = world.tiers._stores[0]._listing
    assert listing is not None
    world.run_until(listing.done)
    store.lose(keys[2])
    assert world.tiers.take_changes() == StoreChanges(gone=(keys[2].block.digest,), found=keys[:2])
    store.lose(keys[1])
    assert world.tiers.take_changes() == StoreChanges(gone=(keys[1].block.digest,))
    assert not world.tiers._stores[0]._lost_meanwhile
    world.check_nothing_is_left()


def test_what_one_store_loses_while_another_lists_it_is_told() -> None:
    first, second = MemoryStore("first", lists=True), SlowLister("second")
    keys = keys_of(2)
    for store in (first, second):
        store.kept |= dict.fromkeys(keys, b"")
        store.gate.clear()
    world = World(places=4, stores=[first, second])
    world.user(cache_of(SPEC, entries=4))
    world.run_until(lambda: "found" in second.calls)
    first.gate.set()
    assert world.changes() == StoreChanges(found=keys)
    del first.kept[keys[1]]
    first.lost.append(keys[1].block.digest)
    assert world.tiers.take_changes() == StoreChanges(below=(keys[1].block.digest,))
    second.gate.set()
    assert world.changes() == StoreChanges(found=keys)
    world.check_nothing_is_left()


def test_a_listing_that_takes_long_makes_no_store_seem_stuck() -> None:
    store = MemoryStore(lists=True)
    world = World(places=4, stores=[store])
    world.user(cache_of(SPEC, entries=4))
    world.clock.now_s += 3600.0
    assert not world.tiers._stores[0].is_stuck
    world.check_nothing_is_left()


def test_a_sequence_longer_than_host_memory_is_loaded_from_a_store() -> None:
    store = MemoryStore()
    keys = keys_of(8)
    writer = World(places=8, stores=[store])
    source = writer.user(cache_of(SPEC, entries=8))
    blocks = blocks_of(source.cache, 8, 1)
    fill_randomly(source.cache)
    source.save(keys, blocks)
    world = World(places=2, stores=[store])
    users = [world.user(cache_of(SPEC, entries=8), late(Script(seed=seed))) for seed in range(2)]
    targets = [blocks_of(user.cache, 8, 2) for user in users]
    loads = [user.begin_load(keys, target) for user, target in zip(users, targets, strict=True)]
    assert [world.result(load) for load in loads] == [8, 8]
    for user, target in zip(users, targets, strict=True):
        assert equal(kv_of(user.cache, target, 8), kv_of(source.cache, blocks, 8))
    assert world.find(keys[:2]) == 2
    # Those that only passed through are reported, so that nobody counts on host memory for them.
    host = world.tiers.counters().entries
    changes = world.tiers.take_changes()
    assert changes is not None
    assert len(set(changes.below)) >= len(keys) - host > 0
    assert changes.gone == ()
    assert world.tiers.take_changes() is None
    world.check_nothing_is_left()


def test_a_find_follows_a_prefix_from_store_to_store() -> None:
    first, second = MemoryStore("first"), MemoryStore("second")
    world = World(stores=[first, second])
    user = world.user(cache_of(SPEC, entries=7))
    keys = keys_of(7)
    user.save(keys, blocks_of(user.cache, 7, 1))
    for store, numbers in ((first, (0, 3, 5)), (second, (1, 2, 5))):
        for number in set(range(7)) - set(numbers):
            del store.kept[keys[number]]
    world.forget_host([keys[number] for number in (0, 1, 2, 3, 5, 6)])
    assert world.find(keys) == 6


def test_two_loads_of_an_entry_read_it_once_from_a_store() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(1), blocks_of(user.cache, 1, 1)
    user.save(keys, blocks)
    world.forget_host(keys)
    store.gate.clear()
    loads = [user.begin_load(keys, blocks_of(user.cache, 1, seed)) for seed in (2, 3)]
    world.run()
    store.gate.set()
    assert [world.result(load) for load in loads] == [1, 1]
    assert store.calls.count("get") == 1
    world.check_nothing_is_left()


def test_a_damaged_entry_of_a_store_is_forgotten_there_too() -> None:
    store = SlowDrops()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(3), blocks_of(user.cache, 3, 1)
    user.save(keys, blocks)
    world.forget_host(keys)
    store.kept[keys[1]] = bytes([store.kept[keys[1]][0] ^ 4]) + store.kept[keys[1]][1:]
    assert user.load(keys, blocks_of(user.cache, 3, 2)) == 1
    world.settle()
    store.calls.clear()
    assert user.load(keys, blocks_of(user.cache, 3, 2)) == 1
    assert "get" not in store.calls, "the store has not dropped it yet"
    store.may_drop.set()
    world.run_until(lambda: keys[1] not in store.kept)
    assert world.find(keys) == 1
    assert world.tiers.counters().damaged_from == {store.name: 1}
    world.check_nothing_is_left()


def test_a_store_that_hangs_costs_a_load_its_time_limit_and_keeps_the_place_until_it_answers() -> None:
    store = MemoryStore()
    world = World(places=2, stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(2), blocks_of(user.cache, 2, 1)
    fill_randomly(user.cache)
    user.save(keys, blocks)
    world.forget_host(keys[1:])
    store.gate.clear()
    load = user.begin_load(keys, blocks_of(user.cache, 2, 2))
    world.run()
    assert not load.done()
    # The thread goes on with others meanwhile.
    assert user.load(keys[:1], blocks_of(user.cache, 1, 3)) == 1
    world.clock.now_s += LIMIT_S
    world.run()
    assert load.result(timeout=0) == 1
    assert user.offloader.in_flight == 0
    # The store may still write to the second place, so no other entry gets it.
    assert world.result(user.begin_save(keys_of(2, salt="other"), blocks)) <= 1
    # The store is not asked any more, so a second load does not wait.
    assert user.load(keys[1:], blocks_of(user.cache, 2, 2)) == 0
    assert world.find(keys[1:]) == 0
    store.gate.set()
    world.settle()
    assert user.load(keys[1:], blocks_of(user.cache, 2, 2)) == 1
    world.check_nothing_is_left()


def test_a_find_and_a_drop_do_not_wait_for_ever_for_a_store() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(2), blocks_of(user.cache, 2, 1)
    user.save(keys, blocks)
    world.forget_host(keys[1:])
    store.gate.clear()
    found: Future[int] = Future()
    user.offloader.find(keys, found)
    world.run()
    assert not found.done()
    world.clock.now_s += FIND_LIMIT_S
    assert world.result(found) == 1
    dropped: Future[None] = Future()
    user.offloader.drop(keys, dropped)
    world.run()
    assert not dropped.done()
    world.clock.now_s += DROP_LIMIT_S
    with pytest.raises(DeadlineExceeded, match="memory"):
        world.result(dropped)
    store.gate.set()
    world.run_until(lambda: not store.kept)


def test_stores_keep_entries_for_a_time_after_they_have_written_them() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, keep = keys_of(3), KeepTime(60.0, 5)
    user.save(keys, blocks_of(user.cache, 3, 1))
    done: Future[None] = Future()
    user.offloader.keep(keys, keep, done)
    world.result(done)
    world.run_until(lambda: bool(store.keeps))
    assert store.keeps == [(keys, keep)]
    assert store.calls.index("keep") > max(at for at, call in enumerate(store.calls) if call == "put")


def test_a_store_that_hangs_collects_only_so_many_keep_times_and_a_slow_one_gets_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.offload_queue._KEEPS_MAX", 5)
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(2), blocks_of(user.cache, 2, 1)

    def keep(seconds: float) -> None:
        user.offloader.keep(keys, KeepTime(seconds, 5), Future())

    store.gate.clear()
    world.result(user.begin_save(keys[:1], blocks))
    world.run_until(lambda: "put" in store.calls)
    world.clock.now_s += STUCK_AFTER_S + 1.0
    for seconds in (10.0, 20.0, 30.0):
        keep(seconds)
    store.gate.set()
    world.run_until(lambda: len(store.keeps) == 2)
    keep(40.0)
    world.run_until(lambda: len(store.keeps) == 3)
    assert [keep.seconds for _, keep in store.keeps] == [10.0, 20.0, 40.0]
    world.check_nothing_is_left()


def test_host_memory_keeps_an_ended_time_no_longer() -> None:
    world = World(places=8)
    user = world.user(cache_of(SPEC, entries=8))
    ours = keys_of(2)
    user.save(ours, blocks_of(user.cache, 2, 1))
    done: Future[None] = Future()
    user.offloader.keep(ours, KeepTime(60.0, 5), done)
    for number in range(8):
        user.save(keys_of(1, salt=f"other {number}"), blocks_of(user.cache, 1, 2))
    assert world.find(ours) == 2
    world.clock.now_s += 60.0
    for number in range(8, 16):
        user.save(keys_of(1, salt=f"other {number}"), blocks_of(user.cache, 1, 2))
    assert world.find(ours) == 0


def drop_root(world: World, root: bytes) -> "Future[DroppedEntries]":
    dropped: Future[DroppedEntries] = Future()
    world.users[0].offloader.drop_roots(frozenset({root}), dropped)
    world.run()
    return dropped


def test_nothing_is_remembered_of_drops_that_every_store_has_answered() -> None:
    world = World(stores=[MemoryStore("memory")])
    user = world.user(cache_of(SPEC))
    for seed in range(20):
        dropped: Future[None] = Future()
        user.offloader.drop(keys_of(2, seed=seed), dropped)
        world.result(dropped)
    assert len(world.tiers._calls._dropping) <= 1  # the last one, until the next


def test_a_drop_of_a_tenant_says_how_many_entries_each_store_had() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, others = keys_of(3), keys_of(1, salt="another tenant")
    user.save(keys, blocks_of(user.cache, 3, 1))
    user.save(others, blocks_of(user.cache, 1, 2))
    world.forget_host(keys[2:])
    done = world.result(drop_root(world, keys[0].root))
    assert (done.counts, done.left) == ({"host": 2, "memory": 3}, {})
    assert (world.find(keys), world.find(others)) == (0, 1)


def test_a_drop_of_a_tenant_names_a_store_that_may_still_have_entries() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys = keys_of(2)
    user.save(keys, blocks_of(user.cache, 2, 1))
    store.error = RuntimeError("a bug")
    done = world.result(drop_root(world, keys[0].root))
    assert done.counts == {"host": 2}
    assert list(done.left) == ["memory"]
    store.error = None
    store.gate.clear()
    late_answer = drop_root(world, keys[0].root)
    assert not late_answer.done()
    world.clock.now_s += DROP_LIMIT_S
    done = world.result(late_answer)
    assert (done.counts, done.left) == ({"host": 0}, {"memory": "it has not answered within 10 s"})
    store.gate.set()
    world.run_until(lambda: not store.kept)


def test_a_load_of_a_tenant_that_is_dropped_brings_nothing_back_to_host_memory() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC, entries=8))
    keys = keys_of(6)
    user.save(keys, blocks_of(user.cache, 6, 1))
    world.forget_host(keys)
    store.gate.clear()
    load = user.begin_load(keys, blocks_of(user.cache, 6, 2))
    world.run()
    dropped = drop_root(world, keys[0].root)
    store.gate.set()
    assert world.result(load) == 0
    world.result(dropped)
    world.settle()
    assert (store.kept, world.tiers.counters().entries, world.find(keys)) == ({}, 0, 0)
    world.check_nothing_is_left()


def test_writes_that_a_slow_store_cannot_follow_are_left_out_and_counted() -> None:
    store = MemoryStore()
    store.gate.clear()
    world = World(places=8, stores=[store])
    user = world.user(cache_of(SPEC, entries=6))
    keys, blocks = keys_of(6), blocks_of(user.cache, 6, 1)
    assert world.result(user.begin_save(keys, blocks)) == 6
    # A quarter of host memory may wait.
    assert world.tiers.counters().not_written == 4
    store.gate.set()
    world.settle()
    assert set(store.kept) == set(keys[:2])
    world.check_nothing_is_left()


def test_a_step_costs_the_same_however_many_writes_wait() -> None:
    """Host memory of 40 GiB has 1,280 of them behind a slow disk, and each load takes several steps per entry."""
    calls = {}
    for entries in (4, 64):
        store = MemoryStore()
        store.gate.clear()
        world = World(places=8 * entries, stores=[store])
        user = world.user(cache_of(SPEC, entries=entries))
        assert world.result(user.begin_save(keys_of(entries), blocks_of(user.cache, entries, 1))) == entries
        assert world.tiers._stores[0].writes_pending == entries
        profile = cProfile.Profile()
        profile.runcall(user.offloader.step)
        calls[entries] = sum(each.callcount for each in profile.getstats())
        store.gate.set()
        world.settle()
        world.check_nothing_is_left()
    assert calls[64] == calls[4]


def test_a_store_that_is_slower_than_computing_is_read_no_more_until_it_is_tried_again() -> None:
    store = MemoryStore(read_s=0.125)
    world = World(places=80, stores=[store])
    user = world.user(cache_of(SPEC, entries=120))
    keys, target = keys_of(60), blocks_of(user.cache, 60, 2)
    user.save(keys, blocks_of(user.cache, 60, 1))
    world.forget_host(keys[2:])
    store.clock = world.clock

    def load(count: int, *, entry_s: float) -> int:
        loaded = world.result(user.begin_load(keys[:count], target, timeout_s=1000.0, entry_s=entry_s))
        world.forget_host(keys[2:])
        return loaded

    # Measured while they are read, so the rest of the same load is computed.
    assert 2 + 16 <= load(60, entry_s=0.0625) < 60
    assert load(60, entry_s=0.0625) == 2  # those of host memory
    assert world.tiers.counters().not_read == 2
    assert load(60, entry_s=10.0) == 60
    world.clock.now_s += 1000.0
    assert load(8, entry_s=0.0625) == 8
    world.check_nothing_is_left()


def test_a_store_that_raises_is_a_miss() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(2), blocks_of(user.cache, 2, 1)
    store.error = RuntimeError("a bug")
    assert user.save(keys, blocks) == 2
    world.forget_host(keys)
    assert world.find(keys) == 0
    assert user.load(keys, blocks) == 0
    world.check_nothing_is_left()


def test_an_entry_that_is_dropped_while_a_store_reads_it_is_not_kept() -> None:
    store = MemoryStore()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(1), blocks_of(user.cache, 1, 1)
    user.save(keys, blocks)
    world.forget_host(keys)
    store.gate.clear()
    load = user.begin_load(keys, blocks)
    world.run()
    dropped: Future[None] = Future()
    user.offloader.drop(keys, dropped)
    store.gate.set()
    assert world.result(load) == 0
    world.result(dropped)
    assert world.find(keys) == 0
    world.check_nothing_is_left()


@pytest.mark.parametrize("by_root", [False, True])
def test_a_load_ends_before_an_entry_that_is_dropped_even_if_it_is_copied_already(*, by_root: bool) -> None:
    script = Script(held=frozenset({"scatter"}))
    world = World()
    user = world.user(cache_of(SPEC), late(script))
    keys, blocks = keys_of(5), blocks_of(user.cache, 5, 1)
    user.save(keys, blocks)
    load = user.begin_load(keys, blocks_of(user.cache, 5, 2))
    world.run_until(lambda: len(script.waiting()) == SLOTS)
    script.release(script.waiting()[2])
    world.run_until(lambda: len(script.waiting()) == SLOTS)  # the third is whole, the last one has begun
    if by_root:
        user.offloader.drop_roots(frozenset({keys[0].root}), Future())
    else:
        user.offloader.drop((keys[2], keys[4]), Future())
    world.run()
    assert not load.done(), "its blocks are written to"
    script.release_all()
    assert world.result(load) == (0 if by_root else 2)
    assert world.find(keys) == (0 if by_root else 2)
    world.check_nothing_is_left()


@dataclass
class SlowReads(MemoryStore):
    """A store whose reads take long after they have the entry."""

    has_read: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def get(self, key: EntryKey, into: memoryview) -> bool:
        found = super().get(key, into)
        self.has_read.set()
        assert self.may_end.wait(DEADLINE_S)
        return found


@pytest.mark.parametrize("by_root", [False, True])
def test_an_entry_that_is_dropped_on_its_way_past_host_memory_reaches_no_load(*, by_root: bool) -> None:
    store = SlowReads()
    world = World(places=1, stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(1), blocks_of(user.cache, 1, 1)
    user.save(keys, blocks)
    world.forget_host(keys)
    entry = store.kept[keys[0]]
    taken = world.tiers.take(keys_of(1, salt="another tenant")[0])  # all of host memory
    assert taken is not None
    first = user.begin_load(keys, blocks)
    world.run_until(store.has_read.is_set)
    assert isinstance(world.tiers._reads.under_way[keys[0]].place, PassingPlace)
    dropped: Future[None] = Future()
    dropped_of_root: Future[DroppedEntries] = Future()
    if by_root:
        user.offloader.drop_roots(frozenset({keys[0].root}), dropped_of_root)
    else:
        user.offloader.drop(keys, dropped)
    world.run_until(lambda: dropped.done() or dropped_of_root.done())
    second = user.begin_load(keys, blocks)  # the store has dropped it, but still reads
    world.run()
    store.may_end.set()
    assert [world.result(load) for load in (first, second)] == [0, 0]
    store.kept[keys[0]] = entry  # saved again
    assert user.load(keys, blocks) == (0 if by_root else 1)
    world.tiers.abandon(taken)
    world.check_nothing_is_left()


@dataclass
class SlowDrops(MemoryStore):
    """A store that reads while its drops wait."""

    may_drop: threading.Event = field(default_factory=threading.Event)

    def drop(self, keys: Sequence[EntryKey]) -> None:
        assert self.may_drop.wait(DEADLINE_S)
        super().drop(keys)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_entry_that_a_store_has_not_dropped_yet_is_not_read_back(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.offload_queue.STUCK_AFTER_S", 60.0)
    store = SlowDrops()
    world = World(stores=[store])
    user = world.user(cache_of(SPEC))
    keys, blocks = keys_of(2), blocks_of(user.cache, 2, 1)
    user.save(keys, blocks)
    world.forget_host(keys)
    dropped: Future[None] = Future()
    user.offloader.drop(keys[1:], dropped)
    assert user.load(keys, blocks) == 1
    if is_late:
        # Its caller waits no more, but the store will still drop it.
        world.clock.now_s += DROP_LIMIT_S
        with pytest.raises(DeadlineExceeded):
            world.result(dropped)
        assert user.load(keys, blocks) == 1
    store.may_drop.set()
    world.run_until(lambda: keys[1] not in store.kept)
    assert world.find(keys) == 1
    assert user.save(keys, blocks) == 2
    world.forget_host(keys)
    assert user.load(keys, blocks) == 2
    world.check_nothing_is_left()


def test_a_pulled_entry_that_is_dropped_on_its_way_is_not_counted() -> None:
    world = World()
    user = world.user(cache_of(SPEC))
    keys = keys_of(2)
    for key, is_dropped in zip(keys, (True, False), strict=True):
        place = world.tiers.take(key, is_pulled=True)
        assert place is not None
        if is_dropped:
            user.offloader.drop((key,), Future())
        world.tiers.commit_pulled(place)
    assert world.tiers.counters().stores[PEER].hits == world.tiers.counters().entries == 1
    world.check_nothing_is_left()


def test_closing_waits_for_writes_but_not_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    store, hung = MemoryStore("a"), MemoryStore("b")
    hung.gate.clear()
    for each, limit_s in ((store, LIMIT_S), (hung, 0.2)):
        world = World(stores=[each])
        user = world.user(cache_of(SPEC))
        world.result(user.begin_save(keys_of(2), blocks_of(user.cache, 2, 1)))
        monkeypatch.setattr("kvtransfer.offload_tiers._CLOSE_TIMEOUT_S", limit_s)
        world.tiers.close()
    assert len(store.kept) == 2
    assert store.is_closed
    assert not hung.is_closed
    hung.gate.set()


# ---- turns


def test_a_save_has_a_slot_while_loads_have_all_others() -> None:
    script = Script(held=frozenset({"scatter", "save"}))
    world = World()
    user = world.user(cache_of(SPEC, entries=8), late(script))
    keys, blocks = keys_of(8), blocks_of(user.cache, 8, 1)
    other = world.user(cache_of(SPEC, entries=8))
    other.save(keys[:6], blocks)
    loads = [user.begin_load(keys[:6], blocks_of(user.cache, 6, seed)) for seed in (2, 3)]
    save = user.begin_save(keys[6:], blocks)
    world.run_until(lambda: len(script.waiting()) == SLOTS)
    assert sorted(operation.kind for operation in script.waiting()) == ["save", *["scatter"] * (SLOTS - 1)]
    script.release_all()
    assert [world.result(load) for load in loads] == [6, 6]
    world.result(save)
    world.check_nothing_is_left()


# ---- settings, names and sums


def test_a_host_cache_without_room_for_one_entry_is_an_error() -> None:
    settings = replace(transfer_settings(GQA, places=1), host_cache_bytes=int(3e-6 * (1 << 30)))
    with pytest.raises(ConfigError, match="host cache has 3221 bytes") as error:
        EntryTiers(EntryLayout(parts_of(GQA)), settings)
    assert (error.value.field, error.value.value) == ("host_cache_gib", "3e-06")
    none, at_least = error.value.allowed
    assert none == "0"
    enough = replace(settings, host_cache_bytes=int(float(at_least.removeprefix("at least ")) * (1 << 30)))
    assert EntryLayout(parts_of(GQA)).entry_bytes <= enough.host_cache_bytes
    EntryTiers(EntryLayout(parts_of(GQA)), enough)
    with_store = replace(
        settings, host_cache_bytes=EntryLayout(parts_of(GQA)).entry_bytes, stores=(lambda *_: MemoryStore(),)
    )
    with pytest.raises(ConfigError, match="host cache"):
        EntryTiers(EntryLayout(parts_of(GQA)), with_store)


def test_a_host_cache_that_the_machine_cannot_give_is_named_as_it_was_given() -> None:
    settings = replace(transfer_settings(GQA, places=1), host_cache_bytes=int(1000000.3 * (1 << 30)))
    tiers = EntryTiers(EntryLayout(parts_of(GQA)), settings)
    with pytest.raises(ConfigError) as error:
        tiers.open(lambda num_bytes: HostPages(num_bytes, pinned=False))
    assert (error.value.field, error.value.value) == ("host_cache_gib", "1000000.3")


def test_memory_that_is_there_already_is_used_and_closed() -> None:
    class Pages(HostPages):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    settings = transfer_settings(GQA, places=2)
    pages = Pages(settings.host_cache_bytes, pinned=False)
    tiers = EntryTiers(EntryLayout(parts_of(GQA)), settings, pages=pages)
    assert tiers.counters().entries == 0
    tiers.open(lambda _: pytest.fail("more memory"))
    assert tiers.places == 2
    tiers.close()
    assert pages.is_closed


def test_namespaces_differ_where_entries_mean_something_else() -> None:
    others = [
        replace(GQA, dtype="float16"),
        replace(GQA, num_layers=4),
        replace(GQA, num_kv_heads=4),
        replace(GQA, head_dim=8),
        replace(GQA, index=INDEX),
        MLA,
    ]
    names = [EntryLayout(parts_of(spec)).namespace for spec in (GQA, *others)]
    names.append(EntryLayout(parts_of(GQA, (range(2, 4),))).namespace)
    assert len(set(names)) == len(names)
    assert EntryLayout(parts_of(replace(GQA))).namespace == names[0]


def test_counters_of_ranks_are_added_up() -> None:
    one = EntryCounters(1, 2, 3, {"host": 4, "file": 5}, 6, 7, 8, 9, {"file": StoreCounters(hits=1)})
    other = EntryCounters(10, 20, 30, {"host": 40}, 60, 70, 80, 90, {"file": StoreCounters(hits=2, failed=3)})
    assert EntryCounters.of_ranks([one, other]) == EntryCounters(
        11, 22, 33, {"host": 44, "file": 5}, 66, 77, 88, 99, {"file": StoreCounters(hits=3, failed=3)}
    )


def test_saves_of_several_sequences_end_together() -> None:
    world = World(places=8)
    user = world.user(cache_of(SPEC))
    ours, theirs = keys_of(3), keys_of(2, salt="other")
    future: Future[tuple[int, ...]] = Future()
    saves = EntryBlocks(ours, blocks_of(user.cache, 3, 1)), EntryBlocks(theirs, blocks_of(user.cache, 2, 2))
    user.offloader.save(saves, future)
    assert not future.done()
    assert not user.offloader.is_awaited
    assert world.result(future) == (3, 2)
    assert world.find(ours) == 3
    assert world.find(theirs) == 2
    world.check_nothing_is_left()


def test_saves_of_several_sequences_are_stopped_together() -> None:
    world = World(places=8)
    user = world.user(cache_of(SPEC))
    future: Future[tuple[int, ...]] = Future()
    sequences = [EntryBlocks(keys_of(2, salt=salt), blocks_of(user.cache, 2, 1)) for salt in ("a", "b")]
    user.offloader.save(sequences, future)
    user.offloader.stop(future)
    assert world.result(future) == (0, 0)
    world.check_nothing_is_left()


@pytest.mark.parametrize(("on_gpu", "copies"), [(False, 6), (True, 1)])
def test_a_gpu_copies_several_messages_of_a_save_through_one_slot(on_gpu: bool, copies: int) -> None:
    world, script = World(places=8), Script()
    user = world.user(cache_of(SPEC, entries=6), late(script, on_gpu=on_gpu))
    keys, blocks, target = keys_of(6), blocks_of(user.cache, 6, 1), blocks_of(user.cache, 6, 2)
    fill_randomly(user.cache)
    wanted = kv_of(user.cache, blocks, 6)
    assert user.save(keys, blocks) == 6
    assert [operation.kind for operation in script.begun] == ["save"] * copies
    assert user.load(keys, target) == 6
    assert equal(kv_of(user.cache, target, 6), wanted)
    world.check_nothing_is_left()


def test_a_gpu_copies_more_messages_than_two_slots_take_one_after_another() -> None:
    entries = 3 * SAVED_AT_ONCE + 1
    world, script = World(places=entries), Script(held=frozenset({"save"}))
    user = world.user(cache_of(SPEC, entries=entries), late(script, on_gpu=True))
    save = user.begin_save(keys_of(entries), blocks_of(user.cache, entries, 1))
    world.run()
    assert len(script.waiting()) == 2
    script.release(script.waiting()[1])  # the later one first
    world.run_until(lambda: len(script.waiting()) == 2)
    assert world.find(keys_of(entries)) == 0
    script.release_all()
    assert world.result(save) == entries
    world.check_nothing_is_left()


def test_an_error_of_a_gpus_copies_leaves_what_was_complete_before() -> None:
    spec = SPECS["sparse"]
    world, script = World(spec, places=40), Script(held=frozenset({"save"}))
    cache = cache_of(spec, entries=20)
    user = world.user(cache, late(script, on_gpu=True))
    keys, blocks = keys_of(20), blocks_of(cache, 20, 1)
    short = EntryBlocks(keys, blocks[: 17 * ENTRY_TOKENS // cache.shape.block_size])  # lacks the last entries
    future: Future[tuple[int, ...]] = Future()
    user.offloader.save((short,), future)
    world.run()
    script.release_all()
    with pytest.raises(InternalError, match="block"):
        world.result(future)
    assert world.find(keys) == SAVED_AT_ONCE
    assert not script.placed
    world.check_nothing_is_left()


def test_what_leaves_for_a_save_is_reported_when_the_save_has_ended() -> None:
    world, script = World(places=2), Script(held=frozenset({"save"}))
    user = world.user(cache_of(SPEC), late(script))
    old, new = keys_of(2), keys_of(2, salt="new")
    script.held = frozenset()
    user.save(old, blocks_of(user.cache, 2, 1))
    script.held = frozenset({"save"})
    save = user.begin_save(new, blocks_of(user.cache, 2, 2))
    world.run()
    assert user.offloader.take_changes() is None
    script.release_all()
    while not save.done():
        user.offloader.step()
    assert user.offloader.take_changes() == StoreChanges(gone=tuple(key.block.digest for key in reversed(old)))
    world.check_nothing_is_left()
