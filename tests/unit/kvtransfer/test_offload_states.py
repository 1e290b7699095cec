"""Recurrent states outside of the cache: their pieces, and what happens when one of them is missing or damaged."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryState, KeepTime
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.offload_calls import FIND_LIMIT_S
from kvtransfer.parts import parts_of
from kvtransfer.stores.entry import EntryLayout
from tests.conformance.kv import make_cache
from tests.unit.kvtransfer.offloading import LoadedSequence, MemoryStore, World, blocks_of, fill_randomly, keys_of

GQA = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
STATE = KVCacheSpec(KVKind.STATE, num_layers=2, num_kv_heads=2, head_dim=5, dtype="float32")


def cache_of(spec: KVCacheSpec) -> PagedKVCache:
    return make_cache(spec, KVCacheLayout.NHD, 16, 8 * ENTRY_TOKENS)


def test_a_model_without_states_has_the_namespace_of_earlier_releases() -> None:
    layout = EntryLayout(parts_of(GQA))
    assert layout.namespace.hex() == "a95fd59c54dbbd23b5ab4fca87aed361"
    assert layout.pieces == ()
    assert layout.state_keys(keys_of(1)[0]) == ()


@pytest.mark.parametrize(
    ("state", "pieces"),
    [
        (STATE, 1),
        (replace(STATE, head_dim=1200), 2),  # a layer in each
        (replace(STATE, head_dim=3000), 4),  # a head in each
        (replace(STATE, head_dim=9000), 4),  # which decides the size of an entry
    ],
)
def test_a_state_is_cut_into_pieces_of_an_entrys_size(state: KVCacheSpec, pieces: int) -> None:
    parts = parts_of(replace(GQA, state=state))
    layout = EntryLayout(parts)
    assert len(layout.pieces) == pieces
    assert all(piece.start == 0 and piece.size <= layout.entry_bytes for piece in layout.pieces)
    cells = [(layer, head) for piece in layout.pieces for layer in piece.layers for head in piece.heads]
    assert sorted(cells) == [(layer, head) for layer in parts[1].layers for head in parts[1].heads]
    keys = layout.state_keys(keys_of(2)[1])
    assert len({key.block.digest for key in (*keys_of(2), *keys)}) == 2 + pieces
    assert [key.block.parent for key in keys] == [keys[0].root, *(key.block.digest for key in keys[:-1])]
    assert {key.token_stop for key in keys} == {2 * ENTRY_TOKENS}
    assert layout.last_state_key(keys_of(2)[1]) == keys[-1]


def test_the_pieces_of_a_short_prompts_state_cost_less_than_entries_and_those_of_a_long_one_nearly_as_much() -> None:
    layout = EntryLayout(parts_of(replace(GQA, state=replace(STATE, head_dim=3000))))
    keys = keys_of(400)
    short, long = (layout.cost(layout.state_keys(keys[number])[0]) for number in (0, 399))
    assert short == layout.cost(keys[0]) / 5
    assert 0.98 * layout.cost(keys[399]) < long < layout.cost(keys[399])


@pytest.mark.parametrize("head_dim", [5, 3000, 9000])
def test_a_flipped_bit_in_a_state_is_never_scattered_as_a_whole_state(head_dim: int) -> None:
    spec = replace(GQA, state=replace(STATE, head_dim=head_dim))
    world = World(spec, places=16)
    user = world.user(cache_of(spec))
    (key,) = keys_of(1)
    fill_randomly(user.cache)
    blocks, other = blocks_of(user.cache, 1, 1), blocks_of(user.cache, 1, 2)
    assert user.cache.state is not None
    wanted = user.cache.state.view[:, :, 0].clone()
    for piece, form in zip(world.layout.state_keys(key), world.layout.pieces, strict=True):
        for bit in (0, form.size // 2, form.size - 1):
            saved = user.begin_save((key,), blocks, EntryState(key, 0))
            assert world.result(saved) == 2
            world.tiers._host._places[piece.block.digest].tensor[bit] ^= 1 << bit % 8
            for _ in range(2):
                loaded = user.begin_load((key,), other, state=EntryState(key, 1))
                assert world.result(loaded) == 1, "the entry, but no state"
    saved = user.begin_save((key,), blocks, EntryState(key, 0))
    assert world.result(saved) == 2
    loaded = user.begin_load((key,), other, state=EntryState(key, 1))
    assert world.result(loaded) == 2
    assert isinstance(loaded, LoadedSequence)
    assert loaded.sources == ("host", "host")
    assert torch.equal(user.cache.state.view[:, :, 1], wanted)
    world.check_nothing_is_left()


def test_a_state_for_which_there_is_no_room_is_not_found() -> None:
    spec = replace(GQA, state=replace(STATE, head_dim=3000))
    world = World(spec, places=5)
    user = world.user(cache_of(spec))
    (key, other) = keys_of(2)
    fill_randomly(user.cache)
    world.result(user.begin_save((key,), blocks_of(user.cache, 1, 1)))
    (place,) = world.tiers._host._places.values()
    world.tiers._host.pin(key)
    taken = world.tiers.take(other)
    assert taken is not None
    found = Future[int]()
    saved = user.begin_save((), (), EntryState(key, 0))
    assert world.result(saved) == 0
    user.offloader.find_state((key,), found)
    assert world.result(found) == 0
    world.tiers._host.unpin(place)
    world.tiers.abandon(taken)
    world.check_nothing_is_left()


def test_the_last_state_is_found_in_host_memory_or_a_store() -> None:
    spec = replace(GQA, state=replace(STATE, head_dim=3000))
    store = MemoryStore()
    world = World(spec, places=40, stores=(store,))
    user = world.user(cache_of(spec))
    keys = keys_of(6)

    def found() -> int:
        future = Future[int]()
        user.offloader.find_state(keys, future)
        return world.result(future)

    assert found() == 0
    for number in (1, 4):
        saved = user.begin_save((), (), EntryState(keys[number], 0))
        assert world.result(saved) == 1
        world.settle()
    assert found() == 5
    world.forget_host(world.layout.state_keys(keys[4]))
    assert found() == 5, "the store has it"
    store.kept.clear()
    assert found() == 2, "host memory has it"
    store.gate.clear()
    future = Future[int]()
    user.offloader.find_state(keys, future)
    world.run()
    assert not future.done()
    world.clock.now_s += FIND_LIMIT_S
    assert world.result(future) == 2, "without the store that does not answer"
    store.gate.set()
    world.check_nothing_is_left()


@pytest.mark.parametrize("with_entry", [True, False])
def test_a_state_is_not_read_where_its_pieces_take_longer_than_computing_it(*, with_entry: bool) -> None:
    spec = replace(GQA, state=replace(STATE, head_dim=3000))
    store = MemoryStore(read_s=0.125)
    world = World(spec, places=80, stores=(store,))
    user = world.user(make_cache(spec, KVCacheLayout.NHD, 16, 64 * ENTRY_TOKENS))
    keys, blocks = keys_of(20), blocks_of(user.cache, 20, 1)
    user.save(keys, blocks)
    saved = user.begin_save((), (), EntryState(keys[0], 0))
    assert world.result(saved) == 1
    world.settle()
    state_keys = world.layout.state_keys(keys[0])
    assert len(state_keys) == 4
    store.clock = world.clock
    world.forget_host(keys)
    assert user.load(keys, blocks) == 20, "so the speed is known"
    entries = EntryBlocks(keys[:1], blocks[: ENTRY_TOKENS // 16]) if with_entry else EntryBlocks((), ())
    for entry_s, loaded in ((0.125, 0), (5.0, len(entries) + 1)):
        world.forget_host((*keys, *state_keys))
        load = user.begin_load(entries.keys, entries.block_ids, 1000.0, entry_s, EntryState(keys[0], 1))
        assert world.result(load) == loaded
    world.check_nothing_is_left()


@pytest.mark.parametrize("seconds", [60.0, None])
def test_a_state_is_kept_with_the_entries_before_it(seconds: float | None) -> None:
    spec = replace(GQA, state=replace(STATE, head_dim=3000))
    world = World(spec, places=24)
    user = world.user(cache_of(spec))
    ours, others = keys_of(2), [keys_of(1, seed=number + 1) for number in range(90)]
    saved = user.begin_save(ours, blocks_of(user.cache, 2, 1), EntryState(ours[1], 0))
    assert world.result(saved) == 3
    if seconds is not None:
        user.offloader.keep(ours, KeepTime(seconds, 5), Future(), with_state=True)
    for keys in others:
        assert user.save(keys, blocks_of(user.cache, 1, 1)) == 1
    found = Future[int]()
    user.offloader.find_state(ours, found)
    is_kept = seconds is not None
    assert (world.find(ours), world.result(found)) == ((2, 2) if is_kept else (0, 0))
