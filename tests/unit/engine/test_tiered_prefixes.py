"""What a request waits for before it is computed: searches, pulls and loads, each within its bound."""

import asyncio
from dataclasses import replace

import pytest

from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, KeptPrefix
from baton.engine import tiered_prefixes
from baton.engine.tiered_prefixes import TieredPrefixes
from tests.unit.engine.scheduling import request
from tests.unit.engine.test_offload import tiered

LONG = tuple(range(100, 300))


class SilentStores:
    """Stores that never answer a search."""

    searches = 0

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        self.searches += 1
        never: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        return await never

    async def save_entries(self, entries: EntryBlocks) -> int:
        raise NotImplementedError

    async def load_entries(self, entries: EntryBlocks, *, timeout_s: float) -> int:
        raise NotImplementedError

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime) -> None:
        raise NotImplementedError

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        raise NotImplementedError

    async def drop_entries_of(self, root: bytes) -> DroppedEntries:
        raise NotImplementedError


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
