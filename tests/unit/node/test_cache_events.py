"""Watchers of a node's prefix cache know what it has: from changes, or from a snapshot where changes are lost."""

from array import array
from collections.abc import AsyncIterator

import pytest

from baton.core.block_keys import BlockNumbers, KeyChain
from baton.engine.scheduling.block_manager import BlockManager
from baton.node import cache_events
from baton.node.cache_events import CacheEvents, CacheLog
from baton.protos.internal.v1 import node_pb2 as pb

BLOCK_SIZE = 4
INCARNATION = 7


class SmallCache(BlockManager):
    """Eight blocks that cache whole sequences one after the other."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__(num_blocks)

    def cache(self, tokens: list[int], *, windowless: bool = False) -> list[int]:
        """Registers the sequence's blocks; returns their numbers."""
        chain, count = KeyChain(identity="m", cache_salt="", block_size=BLOCK_SIZE), len(tokens) // BLOCK_SIZE
        held = self.take((), count)
        for index, block in enumerate(held):
            self.register(block, chain.key(index, array("i", tokens)), windowless=windowless)
        self.give_back(held)
        return BlockNumbers(tokens, identity="m", cache_salt="", block_size=BLOCK_SIZE).up_to(count)


class Watcher:
    """Applies what a watch sends, and checks its numbers."""

    def __init__(self, stream: AsyncIterator[pb.WatchCacheResponse]) -> None:
        self.stream = stream
        self.known: set[int] = set()
        self.last = pb.WatchCacheResponse()

    async def receive(self) -> pb.WatchCacheResponse:
        message = await anext(self.stream)
        assert message.incarnation == INCARNATION
        if message.snapshot:
            self.known.clear()
        else:
            assert message.sequence == self.last.sequence + (not self.last.more)
        self.known |= set(message.stored)
        self.known -= set(message.removed)
        self.last = message
        return message


def watch(events: CacheEvents, after: int = 0, incarnation: int = 0, **flags: bool) -> Watcher:
    return Watcher(
        events.watch(
            pb.WatchCacheRequest(after_sequence=after, incarnation=incarnation, with_tokens=flags.get("t", False))
        )
    )


async def test_a_watch_begins_with_what_is_cached_and_goes_on_with_what_changes() -> None:
    cache = SmallCache()
    first = cache.cache([1] * 12)
    watcher = watch(CacheEvents(cache, incarnation=INCARNATION))
    assert (await watcher.receive()).snapshot
    assert watcher.known == set(first)
    second = cache.cache([2] * 12)
    await watcher.receive()
    assert watcher.known == {*first, *second}
    third = cache.cache([3] * 16)  # takes the place of blocks of the first one, the last ones first
    await watcher.receive()
    assert watcher.known == {first[0], *second, *third}


async def test_an_empty_cache_has_a_snapshot_too() -> None:
    watcher = watch(CacheEvents(SmallCache(), incarnation=INCARNATION))
    message = await watcher.receive()
    assert (message.snapshot, message.more, list(message.stored)) == (True, False, [])


async def test_a_watcher_goes_on_where_it_was_while_the_batches_are_kept() -> None:
    cache = SmallCache()
    events = CacheEvents(cache, incarnation=INCARNATION)
    watcher = watch(events)
    await watcher.receive()
    cache.cache([1] * 8)
    missed = await watcher.receive()
    again = watch(events, missed.sequence - 1, INCARNATION)
    again.last.sequence = missed.sequence - 1
    assert await again.receive() == missed
    restarted = watch(events, missed.sequence - 1, INCARNATION + 1)
    assert (await restarted.receive()).snapshot


async def test_a_large_snapshot_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "_BATCH_BLOCKS", 3)
    cache = SmallCache()
    numbers = cache.cache(list(range(32)))
    watcher = watch(CacheEvents(cache, incarnation=INCARNATION))
    parts = [await watcher.receive() for _ in range(3)]
    assert [(part.snapshot, part.more, len(part.stored)) for part in parts] == [
        (True, True, 3),
        (False, True, 3),
        (False, False, 2),
    ]
    assert watcher.known == set(numbers)


def test_a_position_is_lost_once_too_many_changes_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "_KEPT_BLOCKS", 8)
    cache = SmallCache()
    log = CacheLog(cache)
    log.collect()
    begin = log.last
    assert log.after(begin) == []
    cache.cache([1] * 24)
    log.collect()
    assert [batch.sequence for batch in log.after(begin) or ()] == [begin + 1]
    cache.cache([2] * 24)
    log.collect()
    assert log.after(begin) is None
    assert log.after(log.last + 1) is None


def test_a_cache_that_nobody_watches_stops_to_collect() -> None:
    cache = SmallCache(4000)
    log = CacheLog(cache)
    log.collect()
    begin = log.last
    cache.cache(list(range(4000 * BLOCK_SIZE)))
    assert cache.take_changes() is None
    log.collect()
    assert log.after(begin) is None, "the changes are lost"


async def test_blocks_that_lack_windows_are_not_published() -> None:
    cache = SmallCache()
    watcher = watch(CacheEvents(cache, incarnation=INCARNATION))
    await watcher.receive()
    lacking = cache.cache([1] * 8, windowless=True)
    whole = cache.cache([2] * 8)
    await watcher.receive()
    assert watcher.known == set(whole)
    assert cache.cache([1] * 8) == lacking
    await watcher.receive()
    assert watcher.known == {*whole, *lacking}


async def test_tokens_and_parents_come_on_request() -> None:
    cache = SmallCache()
    numbers = cache.cache(list(range(8)))
    message = await watch(CacheEvents(cache, incarnation=INCARNATION), t=True).receive()
    order = sorted(range(2), key=lambda index: numbers.index(message.stored[index]))
    tokens = array("i", message.tokens).tolist()
    assert [tokens[index * 4 : index * 4 + 4] for index in order] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    root = BlockNumbers([], identity="m", cache_salt="", block_size=BLOCK_SIZE).root
    assert [message.parents[index] for index in order] == [root, numbers[0]]


async def test_streams_end_with_the_service() -> None:
    events = CacheEvents(SmallCache(), incarnation=INCARNATION)
    watcher = watch(events)
    await watcher.receive()
    events.close()
    with pytest.raises(StopAsyncIteration):
        await watcher.receive()
