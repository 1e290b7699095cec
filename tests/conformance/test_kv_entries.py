"""The verbs for entries: of one rank's transfer on its thread, of several ranks, and of ranks in other processes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from baton.core.errors import DataLoss, InternalError
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryState
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer import worker
from kvtransfer.flows import Flow, RankPair
from kvtransfer.ledger import FIRST_PULL_LINK
from kvtransfer.movers.mover import MakeMover
from kvtransfer.movers.table import open_mover
from kvtransfer.offload import SLOTS
from kvtransfer.records import PullJob
from kvtransfer.settings import OpenStore
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import DEADLINE_S, as_bytes, eventually, make_cache, tokens_of
from tests.conformance.late import Script, late
from tests.conformance.ranked_nodes import RankedNode, ranked_node
from tests.unit.kvtransfer.offloading import MemoryStore, blocks_of, fill_randomly, keys_of, transfer_settings

SPEC = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=4, head_dim=4, dtype="bfloat16")
MLA = KVCacheSpec(KVKind.MLA, num_layers=2, num_kv_heads=1, head_dim=6, dtype="bfloat16")
STATE = KVCacheSpec(KVKind.STATE, num_layers=2, num_kv_heads=2, head_dim=5, dtype="float32")
ENTRIES = 6
KEYS = keys_of(ENTRIES)


def a_cache(spec: KVCacheSpec = SPEC) -> PagedKVCache:
    cache = make_cache(spec, KVCacheLayout.HND, 16, (ENTRIES + 2) * ENTRY_TOKENS)
    fill_randomly(cache)
    return cache


def a_transfer(
    cache: PagedKVCache, *, places: int = 8, stores: tuple[OpenStore, ...] = (), make_mover: MakeMover = open_mover
) -> KVTransfer:
    return KVTransfer(
        cache,
        transfer_settings(cache.spec, places=places, stores=stores),
        on_filled=lambda _: None,
        on_refused=lambda _: None,
        make_mover=make_mover,
    )


async def save_and_wipe(transfer: KVTransfer, cache: PagedKVCache) -> tuple[EntryBlocks, torch.Tensor]:
    """Saves a sequence and wipes the cache. Returns blocks for it, and its bytes."""
    blocks = blocks_of(cache, ENTRIES, 1)
    wanted = as_bytes(tokens_of(cache, blocks, ENTRIES * ENTRY_TOKENS))
    assert await transfer.save_entries(EntryBlocks(KEYS, blocks)) == (ENTRIES,)
    cache.memory.zero_()
    return EntryBlocks(KEYS, blocks_of(cache, ENTRIES, 2)), wanted


async def test_a_transfer_keeps_entries_over_a_switch_of_roles() -> None:
    cache, store = a_cache(), MemoryStore()
    async with a_transfer(cache, stores=(lambda *_: store,)) as transfer:
        entries, wanted = await save_and_wipe(transfer, cache)
        await transfer.reopen(incarnation=2, receive_bytes_per_s=None)
        assert await transfer.find_entries(KEYS) == ENTRIES
        assert len(await transfer.load_entries(entries, timeout_s=DEADLINE_S)) == ENTRIES
        assert torch.equal(as_bytes(tokens_of(cache, entries.block_ids, ENTRIES * ENTRY_TOKENS)), wanted)
        counters = transfer.counters().entries
        assert (counters.entries, counters.saved, counters.loaded) == (ENTRIES, ENTRIES, {"host": ENTRIES})
        await transfer.drop_entries(KEYS[3:])
        assert await transfer.find_entries(KEYS) == 3
        await transfer.drop_entries_of(frozenset({KEYS[0].root}))
        assert await transfer.find_entries(KEYS) == 0
        assert store.kept == {}
    assert store.is_closed


async def test_what_was_written_behind_outlives_the_transfer() -> None:
    cache, store = a_cache(), MemoryStore()
    async with a_transfer(cache, places=64, stores=(lambda *_: store,)) as transfer:
        _, wanted = await save_and_wipe(transfer, cache)
    assert set(store.kept) == set(KEYS)
    async with a_transfer(cache, stores=(lambda *_: store,)) as transfer:
        entries = EntryBlocks(KEYS, blocks_of(cache, ENTRIES, 2))
        assert len(await transfer.load_entries(entries, timeout_s=DEADLINE_S)) == ENTRIES
        assert torch.equal(as_bytes(tokens_of(cache, entries.block_ids, ENTRIES * ENTRY_TOKENS)), wanted)


async def test_without_a_host_cache_there_are_no_entries() -> None:
    cache = a_cache()
    settings = transfer_settings(SPEC, places=0)
    transfer = KVTransfer(cache, settings, on_filled=lambda _: None, on_refused=lambda _: None)
    entries = EntryBlocks(KEYS, blocks_of(cache, ENTRIES, 1))
    async with transfer:
        assert await transfer.save_entries(entries) == (0,)
        assert await transfer.find_entries(KEYS) == 0
        assert len(await transfer.load_entries(entries, timeout_s=DEADLINE_S)) == 0
        await transfer.drop_entries(KEYS)
        await transfer.drop_entries_of(frozenset({KEYS[0].root}))


async def test_an_entry_has_the_kv_of_layers_that_draft() -> None:
    cache = a_cache(replace(SPEC, draft=replace(SPEC, num_layers=1)))
    assert cache.draft is not None
    blocks = blocks_of(cache, ENTRIES, 1)
    wanted = as_bytes(tokens_of(cache.draft, blocks, ENTRIES * ENTRY_TOKENS))
    async with a_transfer(cache) as transfer:
        entries, _ = await save_and_wipe(transfer, cache)
        cache.draft.memory.zero_()
        assert len(await transfer.load_entries(entries, timeout_s=DEADLINE_S)) == ENTRIES
    assert torch.equal(as_bytes(tokens_of(cache.draft, entries.block_ids, ENTRIES * ENTRY_TOKENS)), wanted)


async def test_a_state_is_kept_next_to_the_entries_and_found_by_the_last_of_them() -> None:
    cache = a_cache(replace(SPEC, state=STATE))
    assert cache.state is not None
    wanted = cache.state.view[:, :, 1].clone()
    async with a_transfer(cache, places=16) as transfer:
        assert await transfer.find_state(KEYS) == 0
        assert await transfer.save_entries(EntryBlocks((), (), state=EntryState(KEYS[3], 1))) == (1,)
        assert await transfer.save_entries(EntryBlocks((), (), state=EntryState(KEYS[1], 2))) == (1,)
        assert [await transfer.find_state(KEYS[:count]) for count in range(ENTRIES + 1)] == [0, 0, 2, 2, 4, 4, 4]
        entries, tokens = await save_and_wipe(transfer, cache)
        both = replace(entries, keys=KEYS[:4], state=EntryState(KEYS[3], 0))
        assert len(await transfer.load_entries(both, timeout_s=DEADLINE_S)) == 5
        assert torch.equal(cache.state.view[:, :, 0], wanted)
        loaded = as_bytes(tokens_of(cache, entries.block_ids, ENTRIES * ENTRY_TOKENS))
        assert loaded.numel() == tokens.numel()
        await transfer.drop_entries(KEYS[3:4])
        assert await transfer.find_state(KEYS) == 2, "the state after a dropped entry is dropped too"
        assert len(await transfer.load_entries(both, timeout_s=DEADLINE_S)) == 3
        await transfer.drop_entries_of(frozenset({KEYS[0].root}))
        assert await transfer.find_state(KEYS) == 0


@pytest.mark.parametrize("kind", ["save", "load"])
async def test_a_cancelled_call_returns_when_nothing_uses_its_blocks_any_more(kind: str) -> None:
    cache, script = a_cache(), Script()
    async with a_transfer(cache, make_mover=late(script)) as transfer:
        entries, _ = await save_and_wipe(transfer, cache)
        if kind == "save":
            await transfer.drop_entries(KEYS)
        script.held = frozenset({"save", "scatter"})
        call = transfer.save_entries(entries) if kind == "save" else transfer.load_entries(entries, timeout_s=60)
        task = asyncio.create_task(call)
        await eventually(lambda: len(script.waiting()) == SLOTS)
        for _ in range(2):  # also by somebody else, meanwhile
            task.cancel()
            await transfer.find_entries(KEYS)
            assert not task.done()
        script.release_all()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not script.placed
        assert transfer._thread.offloader.in_flight == 0


async def test_a_transfer_that_closes_ends_its_loads_and_saves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_CLOSE_TIMEOUT_S", DEADLINE_S)
    cache, script = a_cache(), Script()
    transfer = a_transfer(cache, make_mover=late(script))
    await transfer.start()
    entries, wanted = await save_and_wipe(transfer, cache)
    script.held = frozenset({"scatter"})
    load = asyncio.create_task(transfer.load_entries(entries, timeout_s=DEADLINE_S))
    await eventually(lambda: len(script.waiting()) == SLOTS)
    closing = asyncio.create_task(transfer.close())
    await asyncio.sleep(0)
    script.release_all()
    count = len(await load)
    await closing
    assert SLOTS <= count <= ENTRIES
    tokens = count * ENTRY_TOKENS
    assert torch.equal(as_bytes(tokens_of(cache, entries.block_ids, tokens)), wanted[:, :, :tokens])
    assert not script.placed


# ---- several ranks


@asynccontextmanager
async def node_of(spec: KVCacheSpec, ranks: int, *, host_cache_bytes: int = 1 << 24) -> AsyncIterator[RankedNode]:
    """A node with room for the entries of one sequence in each rank's cache."""
    async with ranked_node(
        spec,
        ranks,
        KVCacheLayout.NHD,
        128,
        num_tokens=ENTRIES * ENTRY_TOKENS,
        transport="loopback",
        incarnation=1,
        host_cache_bytes=host_cache_bytes,
    ) as node:
        for seed, cache in enumerate(node.caches):
            fill_randomly(cache, seed)
        yield node


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_each_rank_keeps_its_share_and_an_entry_counts_where_all_have_theirs(ranks: int) -> None:
    async with node_of(SPEC, ranks) as node:
        blocks, target = (blocks_of(node.caches[0], ENTRIES, seed) for seed in (1, 2))
        wanted = [as_bytes(tokens_of(cache, blocks, ENTRIES * ENTRY_TOKENS)) for cache in node.caches]
        assert await node.transfer.entries.save_entries(EntryBlocks(KEYS, blocks)) == (ENTRIES,)
        assert await node.transfer.entries.find_entries(KEYS) == ENTRIES
        for cache in node.caches:
            cache.memory.zero_()
        assert len(await node.transfer.entries.load_entries(EntryBlocks(KEYS, target), timeout_s=DEADLINE_S)) == ENTRIES
        for cache, was in zip(node.caches, wanted, strict=True):
            assert torch.equal(as_bytes(tokens_of(cache, target, ENTRIES * ENTRY_TOKENS)), was)
        await eventually(lambda: node.transfer.counters().entries.loaded == {"host": ranks * ENTRIES})
        await node.transfer._ranks[-1].drop_entries(KEYS[4:])
        assert await node.transfer.entries.find_entries(KEYS) == 4
        assert len(await node.transfer.entries.load_entries(EntryBlocks(KEYS, target), timeout_s=DEADLINE_S)) == 4
        await node.transfer.entries.drop_entries_of(frozenset({KEYS[0].root}))
        assert await node.transfer.entries.find_entries(KEYS) == 0


async def test_entries_of_a_request_that_one_rank_owns_are_that_ranks() -> None:
    async with node_of(MLA, 2) as node:
        blocks = blocks_of(node.caches[1], ENTRIES, 1)
        wanted = as_bytes(tokens_of(node.caches[1], blocks, ENTRIES * ENTRY_TOKENS))
        assert await node.transfer.entries.save_entries(EntryBlocks(KEYS, blocks, owner=1)) == (ENTRIES,)
        assert await node.transfer.entries.find_entries(KEYS, owner=1) == ENTRIES
        assert await node.transfer.entries.find_entries(KEYS, owner=0) == 0
        assert await node.transfer.entries.find_entries(KEYS) == 0
        other = node.caches[0].memory.clone()
        node.caches[1].memory.zero_()
        sources = await node.transfer.entries.load_entries(EntryBlocks(KEYS, blocks, owner=1), timeout_s=DEADLINE_S)
        assert sources == ("host",) * ENTRIES
        assert torch.equal(as_bytes(tokens_of(node.caches[1], blocks, ENTRIES * ENTRY_TOKENS)), wanted)
        assert torch.equal(node.caches[0].memory, other)
        await node.transfer.entries.drop_entries(KEYS)
        assert await node.transfer.entries.find_entries(KEYS, owner=1) == 0


@pytest.mark.parametrize("ranks", [1, 2])
async def test_each_rank_pulls_from_the_rank_of_its_number(ranks: int) -> None:
    links: dict[RankPair, tuple[Flow, ...]] = {RankPair(rank, rank): () for rank in range(ranks)}
    async with node_of(SPEC, ranks) as owner, node_of(SPEC, ranks) as reader:
        blocks, target = (blocks_of(owner.caches[0], ENTRIES, seed) for seed in (1, 2))
        wanted = [as_bytes(tokens_of(cache, blocks, ENTRIES * ENTRY_TOKENS)) for cache in owner.caches]
        assert await owner.transfer.entries.save_entries(EntryBlocks(KEYS, blocks)) == (ENTRIES,)
        theirs = await owner.transfer.listen(FIRST_PULL_LINK, links, sends=True)
        ours = await reader.transfer.listen(FIRST_PULL_LINK, links, sends=False)
        await reader.transfer.connect(FIRST_PULL_LINK, theirs)
        await owner.transfer.connect(FIRST_PULL_LINK, ours)
        # The last rank of the owner has lost the last entries.
        await owner.transfer._ranks[-1].drop_entries(KEYS[4:])
        assert await reader.transfer.entries.begin_pull(FIRST_PULL_LINK, PullJob(7, KEYS)) == ENTRIES
        sent = await owner.transfer.entries.serve_pull(FIRST_PULL_LINK, PullJob(7, KEYS))
        assert sent == 4
        found = await reader.transfer.entries.end_pull(FIRST_PULL_LINK, 7, first=sent, timeout_s=DEADLINE_S)
        assert found == await reader.transfer.entries.find_entries(KEYS) == 4
        for cache in reader.caches:
            cache.memory.zero_()
        assert len(await reader.transfer.entries.load_entries(EntryBlocks(KEYS[:4], target), timeout_s=DEADLINE_S)) == 4
        for cache, was in zip(reader.caches, wanted, strict=True):
            tokens = 4 * ENTRY_TOKENS
            assert torch.equal(as_bytes(tokens_of(cache, target, tokens)), was[:, :, :tokens])
        for node in (owner, reader):
            await node.transfer.disconnect(FIRST_PULL_LINK)
        with pytest.raises(DataLoss):
            await reader.transfer.entries.begin_pull(FIRST_PULL_LINK, PullJob(8, KEYS))


async def test_a_drop_that_comes_while_the_transfer_closes_does_not_end_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store answers after the reopening, to calls that have got their error."""
    monkeypatch.setattr(worker, "_CALLS_S", 0.0)  # so that the thread closes before the last of these calls
    monkeypatch.setattr(worker, "_CLOSE_TIMEOUT_S", 0.05)
    cache, store, go = a_cache(), MemoryStore(), threading.Event()

    def held(_: "Future[None]") -> None:
        go.wait(DEADLINE_S)

    async with a_transfer(cache, stores=(lambda *_: store,)) as transfer:
        store.gate.clear()
        thread = transfer._thread
        thread.call(held)  # so that all of them are waiting
        saving = asyncio.create_task(transfer.save_entries(EntryBlocks(KEYS, blocks_of(cache, ENTRIES, 1))))
        await eventually(lambda: thread._calls.num_waiting >= 1)
        waiting = thread._calls.num_waiting
        closing = asyncio.create_task(transfer.reopen(incarnation=2, receive_bytes_per_s=None))
        await eventually(lambda: thread._calls.num_waiting > waiting)
        drops = [asyncio.create_task(transfer.drop_entries_of(frozenset({KEYS[0].root}))) for _ in range(4)]
        await eventually(lambda: thread._calls.num_waiting > waiting + 4)
        go.set()
        await closing
        for error in await asyncio.gather(*drops, return_exceptions=True):
            assert isinstance(error, InternalError)
        await asyncio.gather(saving, return_exceptions=True)
        store.gate.set()
        await eventually(lambda: "drop_roots" in store.calls)
        assert (await transfer.drop_entries_of(frozenset({KEYS[0].root}))).left == {}
        assert not transfer.stuck(after_s=DEADLINE_S)
