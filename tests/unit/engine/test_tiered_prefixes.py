"""What a request waits for before it is computed: searches, pulls and loads, each within its bound."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, KeptPrefix
from baton.engine import tiered_prefixes
from baton.engine.tiered_prefixes import TieredPrefixes
from tests.unit.engine.scheduling import request
from tests.unit.engine.test_offload import decode_all, save_all, tiered

LONG = tuple(range(100, 300))


class SilentStores:
    """Stores that never answer a search."""

    searches = 0

    def __init__(self, *, has_stores: bool = True) -> None:
        self.has_stores = has_stores
        self.drops: list[frozenset[bytes]] = []

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        self.searches += 1
        never: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        return await never

    async def find_state(self, after: tuple[EntryKey, ...]) -> int:
        raise NotImplementedError

    async def save_entries(self, entries: EntryBlocks) -> int:
        raise NotImplementedError

    async def load_entries(self, entries: EntryBlocks, *, timeout_s: float, entry_s: float) -> int:
        raise NotImplementedError

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime, *, with_state: bool = False) -> None:
        raise NotImplementedError

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        raise NotImplementedError

    async def drop_entries_of(self, roots: frozenset[bytes]) -> DroppedEntries:
        self.drops.append(roots)
        return DroppedEntries()


class NoSource:
    async def pull(self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, owner: int | None) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("kept", [None, KeptPrefix("there:1", 7, 192)])
async def test_a_request_waits_for_one_search_of_stores_that_do_not_answer(
    kept: KeptPrefix | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_prefixes, "_FIND_S", 0.01)
    stores = SilentStores()
    prefixes = TieredPrefixes(stores, NoSource(), tiered(), on_room=lambda: None)
    assert await prefixes.prefetch(replace(request("a", LONG), kept_elsewhere=kept)) == 0
    assert stores.searches == 1
    await prefixes.close()


async def test_host_memory_is_not_asked_for_what_was_never_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_FIND_S", 0.01)
    stores, scheduler = SilentStores(has_stores=False), tiered()
    prefixes = TieredPrefixes(stores, NoSource(), scheduler, on_room=lambda: None)
    assert await prefixes.prefetch(request("a", LONG)) == 0
    assert stores.searches == 0
    decode_all(scheduler, "a", LONG)
    save_all(scheduler)
    for number in range(3):  # others take its blocks
        decode_all(scheduler, str(number), tuple(range(900, 0, -1))[number:])
        save_all(scheduler)
    assert await prefixes.prefetch(request("b", LONG)) == 0
    assert stores.searches == 1
    await prefixes.close()


class EmptyStores(SilentStores):
    """Stores that have nothing, not even what was pulled a moment ago."""

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        self.searches += 1
        return 0


class TwoEntries:
    """A node that has the first two entries of every sequence."""

    async def pull(self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, owner: int | None) -> int:
        return 2


async def test_what_was_pulled_and_not_loaded_is_found_by_a_later_request() -> None:
    stores = EmptyStores(has_stores=False)
    prefixes = TieredPrefixes(stores, TwoEntries(), tiered(), on_room=lambda: None)
    kept = KeptPrefix("there:1", 7, 192)
    assert await prefixes.prefetch(replace(request("a", LONG), kept_elsewhere=kept)) == 0
    before = stores.searches
    assert await prefixes.prefetch(request("b", LONG)) == 0
    assert stores.searches == before + 1
    await prefixes.close()


async def test_all_roots_of_a_drop_go_to_the_stores_in_one_call() -> None:
    """Each call may be a pass over all files."""
    stores, roots = SilentStores(), frozenset({b"model", b"adapter"})
    prefixes = TieredPrefixes(stores, NoSource(), tiered(), on_room=lambda: None)
    assert await prefixes.drop_roots(roots) == DroppedEntries()
    assert stores.drops == [roots]
    await prefixes.close()
