"""What a request waits for before it is computed: searches, pulls and loads, each within its bound."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, KeptPrefix, Sources, StoreChanges
from baton.core.types import NOTHING_LOADED
from baton.engine import tiered_prefixes
from baton.engine.tiered_prefixes import TieredPrefixes
from tests.unit.engine.scheduling import finish, launch, request
from tests.unit.engine.test_offload import decode_all, save_all, tiered
from tests.unit.engine.test_offload_states import tiered as tiered_states

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

    async def save_entries(self, *saves: EntryBlocks) -> tuple[int, ...]:
        raise NotImplementedError

    async def load_entries(self, entries: EntryBlocks, *, timeout_s: float, entry_s: float) -> Sources:
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

    async def pull_state(
        self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, held: int, every: int, resumed: int
    ) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("kept", [None, KeptPrefix("there:1", 7, 192)])
async def test_a_request_waits_for_one_search_of_stores_that_do_not_answer(
    kept: KeptPrefix | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_prefixes, "_FIND_S", 0.01)
    stores = SilentStores()
    prefixes = TieredPrefixes(stores, NoSource(), tiered(), on_room=lambda: None)
    assert await prefixes.prefetch(replace(request("a", LONG), kept_elsewhere=kept)) == NOTHING_LOADED
    assert stores.searches == 1
    await prefixes.close()


async def test_host_memory_is_not_asked_for_what_was_never_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_FIND_S", 0.01)
    stores, scheduler = SilentStores(has_stores=False), tiered()
    prefixes = TieredPrefixes(stores, NoSource(), scheduler, on_room=lambda: None)
    assert await prefixes.prefetch(request("a", LONG)) == NOTHING_LOADED
    assert stores.searches == 0
    decode_all(scheduler, "a", LONG)
    save_all(scheduler)
    for number in range(3):  # others take its blocks
        decode_all(scheduler, str(number), tuple(range(900, 0, -1))[number:])
        save_all(scheduler)
    assert await prefixes.prefetch(request("b", LONG)) == NOTHING_LOADED
    assert stores.searches == 1
    await prefixes.close()


class EmptyStores(SilentStores):
    """Stores that have nothing, not even what was pulled a moment ago."""

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        self.searches += 1
        return 0


class TwoEntries(NoSource):
    """A node that has the first two entries of every sequence."""

    async def pull(self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, owner: int | None) -> int:
        return 2


async def test_what_was_pulled_and_not_loaded_is_found_by_a_later_request() -> None:
    stores = EmptyStores(has_stores=False)
    prefixes = TieredPrefixes(stores, TwoEntries(), tiered(), on_room=lambda: None)
    kept = KeptPrefix("there:1", 7, 192)
    assert await prefixes.prefetch(replace(request("a", LONG), kept_elsewhere=kept)) == NOTHING_LOADED
    before = stores.searches
    assert await prefixes.prefetch(request("b", LONG)) == NOTHING_LOADED
    assert stores.searches == before + 1
    await prefixes.close()


async def test_what_is_lost_right_after_it_was_found_is_not_seen() -> None:
    scheduler = tiered()
    prefixes = TieredPrefixes(EmptyStores(), NoSource(), scheduler, on_room=lambda: None)
    wanted = prefixes.wanted(request("a", LONG))
    assert wanted is not None
    found = wanted.entries(0, 3)
    prefixes.stores_changed(StoreChanges(found=found))
    prefixes.stores_changed(StoreChanges(gone=(found[1].block.digest,)))
    await prefixes.close()
    assert scheduler.offload is not None
    assert [scheduler.offload.kept.has(key) for key in found] == [True, False, False]


class StateElsewhere(NoSource):
    """Another node that has every state, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, int, int]] = []

    async def pull_state(
        self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, held: int, every: int, resumed: int
    ) -> int:
        self.asked.append((keys[0].number, len(keys), held, every, resumed))
        return len(keys)


class StoresWith(EmptyStores):
    """Stores that have the first entries of every sequence, and the state after one of them."""

    def __init__(self, entries: int, state: int) -> None:
        super().__init__(has_stores=False)
        self._entries, self._state = entries, state

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        return max(0, min(self._entries - keys[0].number, len(keys)))

    async def find_state(self, after: tuple[EntryKey, ...]) -> int:
        return next((count for count, key in enumerate(after, 1) if key.number + 1 == self._state), 0)

    async def load_entries(self, entries: EntryBlocks, *, timeout_s: float, entry_s: float) -> Sources:
        return ()


@pytest.mark.parametrize(
    ("entries", "state", "kept", "asked"),
    [
        pytest.param(0, 0, 256, (0, 4, 0, 1, 0), id="nothing-is-here"),
        pytest.param(3, 0, 256, (0, 4, 3, 1, 0), id="entries-without-a-state"),
        pytest.param(3, 2, 256, (2, 2, 1, 1, 128), id="an-earlier-state"),
        pytest.param(4, 0, 200, (0, 3, 3, 1, 0), id="more-entries-than-are-there"),
        pytest.param(4, 3, 200, None, id="the-last-state-is-here"),
        pytest.param(4, 0, 63, None, id="no-entry-is-there"),
    ],
)
async def test_a_request_asks_for_the_last_state_and_for_the_entries_that_the_stores_lack(
    entries: int, state: int, kept: int, asked: tuple[int, int, int, int, int] | None
) -> None:
    source = StateElsewhere()
    prefixes = TieredPrefixes(StoresWith(entries, state), source, tiered_states(), on_room=lambda: None)
    prompt = tuple(range(100, 100 + 4 * 64 + 10))
    await prefixes.prefetch(replace(request("a", prompt), kept_elsewhere=KeptPrefix("there:1", 7, kept)))
    assert source.asked == ([] if asked is None else [asked])
    await prefixes.close()


async def test_all_roots_of_a_drop_go_to_the_stores_in_one_call() -> None:
    """Each call may be a pass over all files."""
    stores, roots = SilentStores(), frozenset({b"model", b"adapter"})
    prefixes = TieredPrefixes(stores, NoSource(), tiered(), on_room=lambda: None)
    assert await prefixes.drop_roots(roots) == DroppedEntries()
    assert stores.drops == [roots]
    await prefixes.close()


class CountedSaves(SilentStores):
    """Stores that save all at once, and remember the entries of each call."""

    def __init__(self) -> None:
        super().__init__(has_stores=False)
        self.calls: list[list[int]] = []
        self.keys: list[EntryKey] = []
        self.dropped: list[EntryKey] = []

    async def save_entries(self, *saves: EntryBlocks) -> tuple[int, ...]:
        self.calls.append([len(entries) for entries in saves])
        self.keys += [key for entries in saves for key in entries.keys]
        return tuple(map(len, saves))

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        self.dropped += keys


async def saved_while_a_step_runs(num_blocks: int) -> tuple[CountedSaves, TieredPrefixes, Callable[[], object]]:
    """Two requests have ended, and the step of a third one runs. The function ends that step."""
    stores, scheduler = CountedSaves(), tiered(num_blocks=num_blocks)
    prefixes = TieredPrefixes(stores, NoSource(), scheduler, on_room=lambda: None)
    decode_all(scheduler, "a", LONG)
    decode_all(scheduler, "b", LONG[::-1])
    scheduler.submit(request("c", LONG[:10]), 0.0)
    batch = launch(scheduler)
    prefixes.save_finished()
    return stores, prefixes, partial(finish, scheduler, batch)


async def test_what_several_requests_have_offered_is_saved_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_SAVE_EVERY_S", math.inf)
    stores, prefixes, end_step = await saved_while_a_step_runs(num_blocks=4096)
    await prefixes.close()
    assert stores.calls == []
    end_step()
    prefixes.save_finished()  # no step runs any more that would bring another occasion
    await prefixes.close()
    assert stores.calls == [[3, 3]]


async def test_what_was_offered_is_saved_next_to_a_step_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_SAVE_EVERY_S", 0.0)
    stores, prefixes, _ = await saved_while_a_step_runs(num_blocks=4096)
    await prefixes.close()
    assert stores.calls == [[3, 3]]


async def test_a_save_waits_as_long_again_for_a_turn_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(tiered_prefixes, "monotonic", lambda: now_s)
    stores, prefixes, _ = await saved_while_a_step_runs(num_blocks=4096)
    now_s += 1.5 * tiered_prefixes._SAVE_EVERY_S
    prefixes.save_finished(is_quiet=False)
    await prefixes.close()
    assert stores.calls == []
    prefixes.save_finished(is_quiet=True)
    await prefixes.close()
    assert stores.calls == [[3, 3]]


async def test_a_save_does_not_wait_for_ever_for_a_turn_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(tiered_prefixes, "monotonic", lambda: now_s)
    stores, prefixes, _ = await saved_while_a_step_runs(num_blocks=4096)
    now_s += 2 * tiered_prefixes._SAVE_EVERY_S
    prefixes.save_finished(is_quiet=False)
    await prefixes.close()
    assert stores.calls == [[3, 3]]


async def test_what_holds_many_of_the_blocks_is_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_SAVE_EVERY_S", math.inf)
    stores, prefixes, _ = await saved_while_a_step_runs(num_blocks=512)
    await prefixes.close()
    assert stores.calls == [[3, 3]]


async def test_what_must_be_dropped_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_SAVE_EVERY_S", math.inf)
    stores, scheduler = CountedSaves(), tiered(num_blocks=4096)
    prefixes = TieredPrefixes(stores, NoSource(), scheduler, on_room=lambda: None)
    decode_all(scheduler, "a", LONG)
    prefixes.save_finished()
    await prefixes.close()
    scheduler.submit(request("b", LONG[:10]), 0.0)
    launch(scheduler)
    assert scheduler.offload is not None
    scheduler.offload.saves._forgotten.append(stores.keys[0])
    prefixes.save_finished()
    await prefixes.close()
    assert stores.dropped == stores.keys[:1]


async def test_most_requests_need_not_be_looked_for() -> None:
    scheduler = tiered()
    prefixes = TieredPrefixes(SilentStores(has_stores=False), NoSource(), scheduler, on_room=lambda: None)
    assert prefixes.wanted(request("a", LONG)) is None
    assert prefixes.wanted(replace(request("a", LONG), kept_elsewhere=KeptPrefix("there:1", 7, 192))) is not None
    decode_all(scheduler, "a", LONG)
    save_all(scheduler)
    assert prefixes.wanted(request("b", LONG)) is None  # the cache has it


async def test_a_state_is_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_SAVE_EVERY_S", math.inf)
    stores, scheduler = CountedSaves(), tiered_states(num_blocks=4096)
    prefixes = TieredPrefixes(stores, NoSource(), scheduler, on_room=lambda: None)
    decode_all(scheduler, "a", LONG)
    scheduler.submit(request("b", LONG[:10]), 0.0)
    launch(scheduler)
    prefixes.save_finished()
    await prefixes.close()
    assert stores.calls
