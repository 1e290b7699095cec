"""Publishes a node's prefix cache to the gateways that watch it: numbered batches of changes, and snapshots.

While there are watchers, the changes are collected at intervals, once for all of them, so a cache without watchers
costs next to nothing. The latest batches are kept; a watcher that needs older ones receives a snapshot.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from baton.core.block_keys import BlockKey, number_of
from baton.engine.scheduling.prefixes import PrefixCache
from baton.protos.internal.v1 import node_pb2 as pb

_INTERVAL_S = 0.05
_BATCH_BLOCKS = 2048  # with the tokens of blocks of 256 a message stays below gRPC's 4 MiB
_KEPT_BLOCKS = 1 << 15


class EventBatch(NamedTuple):
    """Changes of the cache under one number. `outside` are those of the stored blocks that must be loaded first, and
    `below` those of them that are not in host memory."""

    sequence: int
    stored: Sequence[BlockKey]
    removed: Sequence[int]
    outside: Sequence[int] = ()
    below: Sequence[int] = ()

    @property
    def size(self) -> int:
        return len(self.stored) + len(self.removed)


class CacheLog:
    """The last changes of one cache, numbered from 1. Pure.

    Attributes:
        last: sequence of the last change.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.last = 0
        self._cache = cache
        self._kept: deque[EventBatch] = deque()
        self._kept_blocks = 0

    def collect(self) -> None:
        """Records what has changed since the last call."""
        changes = self._cache.take_changes()
        if changes is None:  # unknown changes are a gap
            self._cache.follow()
            self._kept.clear()
            self._kept_blocks = 0
            self.last += 1
            return
        items = iter(changes.items())
        while part := list(islice(items, _BATCH_BLOCKS)):
            self.last += 1
            stored = [key for _, key in part if key is not None]
            removed = [number_of(digest) for digest, key in part if key is None]
            self._kept.append(EventBatch(self.last, stored, removed, *self.places(stored)))
            self._kept_blocks += len(part)
        while self._kept_blocks > _KEPT_BLOCKS:
            self._kept_blocks -= self._kept.popleft().size

    def after(self, sequence: int) -> list[EventBatch] | None:
        """All batches after this one. Returns None if some of them are no longer kept."""
        missing = self.last - sequence
        if not 0 <= missing <= len(self._kept):
            return None
        return list(islice(self._kept, len(self._kept) - missing, None))

    def places(self, keys: Sequence[BlockKey]) -> tuple[list[int], list[int]]:
        """The blocks that must be loaded first, and the subset of these that is not in host memory."""
        outside = self._cache.outside([key.digest for key in keys])
        below = self._cache.only_below(outside) if outside else []
        return list(map(number_of, outside)), list(map(number_of, below))

    def cached_keys(self) -> list[BlockKey]:
        """All blocks that the cache has after the last change. Call it right after `collect`."""
        return self._cache.cached_keys()


class CacheEvents:
    """Serves WatchCache, on the event loop of the engine.

    Args:
        incarnation: of the node; sequences that another incarnation counted are unknown here.
    """

    def __init__(self, cache: PrefixCache, *, incarnation: int) -> None:
        self._log = CacheLog(cache)
        self._incarnation = incarnation
        self._closed = False
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._collecting: asyncio.Task[None] | None = None

    def renew(self, incarnation: int) -> None:
        """Begins another incarnation of the node. Streams end, and their watchers start over."""
        self._incarnation = incarnation
        self._wake()

    def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        self._wake()

    async def watch(self, request: pb.WatchCacheRequest) -> AsyncIterator[pb.WatchCacheResponse]:
        """The changes after `request.after_sequence`, or a snapshot and the changes after it, until `close`."""
        self._num_watchers += 1
        try:
            async for batch in self._watch(request):
                yield batch
        finally:
            self._num_watchers -= 1

    async def _watch(self, request: pb.WatchCacheRequest) -> AsyncIterator[pb.WatchCacheResponse]:
        log, incarnation = self._log, self._incarnation
        position = request.after_sequence if request.incarnation == incarnation else -1
        log.collect()
        while not self._closed and incarnation == self._incarnation:
            self._keep_collecting()
            woken, batches = self._changed, log.after(position)
            if batches is None:
                log.collect()  # the snapshot is of the cache now
                position = log.last
                for part, keys in self._snapshot(position, log.cached_keys()):
                    yield self._with_keys(part, keys, with_tokens=request.with_tokens)
                continue
            for batch in batches:
                changed = pb.WatchCacheResponse(
                    sequence=batch.sequence,
                    incarnation=self._incarnation,
                    removed=batch.removed,
                    outside=batch.outside,
                    below=batch.below,
                )
                yield self._with_keys(changed, batch.stored, with_tokens=request.with_tokens)
                position = batch.sequence
            if position == log.last:
                await woken.wait()

    def _keep_collecting(self) -> None:
        if self._collecting is not None and self._collecting.done():
            ended, self._collecting = self._collecting, None
            ended.result()  # its error is this watcher's
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._collect(), name="cache-events")
            self._collecting.add_done_callback(lambda _: self._wake())

    async def _collect(self) -> None:
        """Collects changes for all watchers while there are any."""
        announced = self._log.last
        while self._num_watchers and not self._closed:
            await asyncio.sleep(_INTERVAL_S)
            self._log.collect()
            if self._log.last != announced:
                announced = self._log.last
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _snapshot(
        self, sequence: int, keys: Sequence[BlockKey]
    ) -> Iterator[tuple[pb.WatchCacheResponse, Sequence[BlockKey]]]:
        for start in range(0, max(1, len(keys)), _BATCH_BLOCKS):
            stop = start + _BATCH_BLOCKS
            outside, below = self._log.places(keys[start:stop])
            message = pb.WatchCacheResponse(
                sequence=sequence,
                incarnation=self._incarnation,
                snapshot=start == 0,
                more=stop < len(keys),
                outside=outside,
                below=below,
            )
            yield message, keys[start:stop]

    def _with_keys(
        self, message: pb.WatchCacheResponse, keys: Sequence[BlockKey], *, with_tokens: bool
    ) -> pb.WatchCacheResponse:
        message.stored.extend([number_of(key.digest) for key in keys])
        if with_tokens:
            message.parents.extend([number_of(key.parent) for key in keys])
            message.tokens = b"".join([key.tokens for key in keys])
        return message
