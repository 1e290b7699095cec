"""One rank's KV transfer in its own process, as the event loop uses it.

Owns one thread (`kvtransfer.worker`), which owns everything that moves bytes; it receives calls and answers through
futures.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from baton.core.errors import BatonError, DeadlineExceeded, Draining, InternalError
from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.wire.conversion import Converter, open_converter
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant, LeaseTotals, UsedNumbers
from kvtransfer.ledger import Peer
from kvtransfer.link import LinkSpeed
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.movers.mover import MakeMover
from kvtransfer.movers.table import open_mover
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.rank_transfer import (
    OnFailed,
    OnFilled,
    OnLinkFailed,
    OnRefused,
    OnStoresChanged,
    RankTransfer,
    until_done,
)
from kvtransfer.records import EntryLink, LinkMeasure, PullJob, SendJob, TransferCounters, WarmUp
from kvtransfer.segments import TRAILER_BYTES, Segment, check_segment_bytes
from kvtransfer.settings import TransferSettings
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.transports.table import open_probe
from kvtransfer.worker import TransferThread

T = TypeVar("T")


class KVTransfer(RankTransfer):
    """The transfer of one rank's cache; an async context manager. `RankTransfer` documents the verbs.

    Args:
        on_filled, on_refused, on_stores_changed: called on the event loop, in the order of the events.
        make_mover: makes the mover between cache and staging; by default the mover for the cache's device.
        clock: monotonic seconds, for receive limits and for timing links.
        host_pages: the host memory for entries, if there is some already; it is closed with the transfer.

    Raises:
        ConfigError: not even one token of one layer fits into a segment, or not one entry into the host cache.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        settings: TransferSettings,
        *,
        on_filled: OnFilled,
        on_refused: OnRefused,
        on_stores_changed: OnStoresChanged = lambda _: None,
        make_mover: MakeMover = open_mover,
        clock: Callable[[], float] = time.monotonic,
        host_pages: HostPages | None = None,
    ) -> None:
        check_segment_bytes(cache.spec, settings.segment_bytes)
        self.message_bytes = settings.message_bytes
        self._cache = cache
        self._settings = settings
        self._probe = None if settings.peers_are_known else open_probe(settings.transport)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._used_leases = UsedNumbers()
        self._on_link_failed: OnLinkFailed | None = None
        self._on_failed: OnFailed | None = None
        layout = EntryLayout(settings.parts(cache.spec)) if settings.host_cache_bytes else None
        self._tiers = EntryTiers(layout, settings, clock=clock, pages=host_pages) if layout is not None else None
        self._make_thread = partial(
            TransferThread,
            cache,
            tiers=self._tiers,
            make_mover=make_mover,
            on_filled=partial(self._post, on_filled),
            on_refused=partial(self._post, on_refused),
            on_stores_changed=partial(self._post, on_stores_changed),
            on_link_failed=lambda peer, error: self._post(self._link_failed, (peer, error)),
            on_failed=lambda error: self._post(self._failed, error),
            clock=clock,
        )
        self._thread = self._make_thread(settings)

    def watch(self, on_link_failed: OnLinkFailed, on_failed: OnFailed) -> None:
        self._on_link_failed, self._on_failed = on_link_failed, on_failed

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self._thread.start())

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
        await asyncio.to_thread(self._thread.stop)
        if self._tiers is not None:
            await asyncio.to_thread(self._tiers.close)

    async def reopen(self, *, incarnation: int, receive_bytes_per_s: float | None) -> None:
        await asyncio.to_thread(self._thread.stop)
        self._settings = replace(self._settings, incarnation=incarnation, receive_bytes_per_s=receive_bytes_per_s)
        self._thread = self._make_thread(self._settings)
        await asyncio.wrap_future(self._thread.start())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def listen(self, peer: int) -> bytes:
        return await self._call(lambda future: self._thread.links.listen(peer, future))

    async def connect(
        self,
        peer: int,
        address: bytes,
        *,
        message_bytes: int | None = None,
        group: int | None = None,
        conversion: KVConversion | None = None,
        incarnation: int = 0,
        sealed: bool = False,
        has_draft: bool = True,
    ) -> None:
        limit = self.message_bytes if message_bytes is None else min(message_bytes, self.message_bytes)
        if self._probe is not None:
            await self._probe.check(address)
        converter: Converter | None = None
        if conversion is not None:
            # On a GPU this waits and compiles. It runs here so that the transfer thread keeps serving other peers.
            converter = await asyncio.to_thread(open_converter, self._cache, conversion.target_dtype, conversion.scales)
        check_segment_bytes(converter.spec if converter else self._cache.spec, limit - TRAILER_BYTES)
        wanted = Peer(
            peer,
            limit - TRAILER_BYTES,
            group=group,
            converter=converter,
            incarnation=incarnation,
            sealed=sealed,
            has_draft=has_draft,
        )
        await self._call(lambda future: self._thread.links.connect(wanted, address, future))

    async def disconnect(self, peer: int) -> tuple[int, ...]:
        try:
            return await self._call(lambda future: self._thread.links.disconnect(peer, future))
        except Draining:  # the thread has failed: nothing is left to close
            return ()

    async def warm_up(self, peer: int, sender_number: int) -> WarmUp:
        return await self._call(lambda future: self._thread.sender.warm_up(peer, sender_number, future))

    async def warmed_up(self, peer: int, messages: int, bytes: int, *, timeout_s: float) -> LinkMeasure:
        waiting: asyncio.Future[LinkMeasure] = self._call(
            lambda future: self._thread.links.expect_warm_up(peer, messages, bytes, future)
        )
        awaited = f"{messages} warm-up messages"
        try:
            async with asyncio.timeout(timeout_s):
                measure = await waiting
                awaited = "answers to pings"
                latency_s: float = await self._call(lambda future: self._thread.links.measure_latency(peer, future))
                return replace(measure, latency_s=latency_s)
        except TimeoutError:
            raise DeadlineExceeded(f"{awaited} did not arrive within {timeout_s:g} s") from None

    async def use_link(self, peer: int, link: LinkSpeed) -> None:
        await self._call(lambda future: self._thread.links.use_link(peer, link, future))

    async def send(self, job: SendJob) -> tuple[Segment, ...]:
        try:
            return await self._call(lambda future: self._thread.sender.send(job, future))
        except asyncio.CancelledError:
            self._thread.call(lambda future: self._thread.sender.quiet(job.peer, job.lease, future))
            raise

    async def quiet(self, peer: int, lease: int) -> None:
        await self._call(lambda future: self._thread.sender.quiet(peer, lease, future))

    def open_lease(self, lease: LeaseGrant) -> "asyncio.Future[None]":
        self._check_grant(lease)
        self._used_leases.add(lease.number)

        def opened(future: "Future[None]") -> None:
            self._thread.receiver.open(lease)
            future.set_result(None)

        return asyncio.shield(self._call(opened))

    async def close_lease(self, number: int) -> LeaseTotals:
        return await self._call(lambda future: self._thread.receiver.close(number, future))

    async def save_entries(self, *saves: EntryBlocks) -> tuple[int, ...]:
        if self._tiers is None or not any(saves):
            return (0,) * len(saves)
        return await self._ended(lambda future: self._thread.offloader.save(saves, future), is_urgent=False)

    async def load_entries(
        self, entries: EntryBlocks, *, timeout_s: float, entry_s: float = math.inf
    ) -> tuple[str, ...]:
        if self._tiers is None or not entries:
            return ()
        return await self._ended(lambda future: self._thread.offloader.load(entries, timeout_s, entry_s, future))

    async def find_entries(self, keys: tuple[EntryKey, ...]) -> int:
        if self._tiers is None or not keys:
            return 0
        return await self._call(lambda future: self._thread.offloader.find(keys, future))

    async def find_state(self, after: tuple[EntryKey, ...]) -> int:
        if self._tiers is None or not self._tiers.layout.pieces or not after:
            return 0
        return await self._call(lambda future: self._thread.offloader.find_state(after, future))

    async def begin_pull(self, job: PullJob, links: tuple[EntryLink, ...]) -> int:
        if self._tiers is None or not job:
            return 0
        return await self._call(lambda future: self._thread.begin_pull(job, links, future))

    async def end_pull(self, number: int, *, first: int, timeout_s: float) -> int:
        if self._tiers is None:
            return 0
        return await self._call(lambda future: self._thread.pulls.receiver.end(number, first, timeout_s, future))

    async def serve_pull(self, link: EntryLink, job: PullJob) -> int:
        if self._tiers is None or not job:
            return 0
        return await self._call(lambda future: self._thread.serve_pull(link, job, future))

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime, *, with_state: bool = False) -> None:
        if self._tiers is not None and keys:
            await self._call(lambda future: self._thread.offloader.keep(keys, keep, future, with_state=with_state))

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        if self._tiers is not None and keys:
            await self._call(lambda future: self._thread.offloader.drop(keys, future))

    async def drop_entries_of(self, roots: frozenset[bytes]) -> DroppedEntries:
        if self._tiers is None:
            return DroppedEntries()
        return await self._call(lambda future: self._thread.drop_roots(roots, future))

    def counters(self) -> TransferCounters:
        counters = self._thread.ledger.snapshot()
        return counters if self._tiers is None else replace(counters, entries=self._tiers.counters())

    def stuck(self, *, after_s: float) -> str:
        return self._thread.where() if self._thread.stalled_s > after_s else ""

    def _link_failed(self, link: tuple[int, BatonError]) -> None:
        if self._on_link_failed is not None:
            self._on_link_failed(*link)

    def _failed(self, error: BatonError) -> None:
        if self._on_failed is not None:
            self._on_failed(error)

    def _check_grant(self, lease: LeaseGrant) -> None:
        shape = self._cache.shape
        if lease.token_stop > len(lease.block_ids) * shape.block_size:
            raise InternalError(
                f"lease {lease.number} has {len(lease.block_ids)} blocks of {shape.block_size} "
                f"for {lease.token_stop} tokens",
                field="block_ids",
            )
        if any(not 0 <= block < shape.num_blocks for block in lease.block_ids):
            raise InternalError(f"lease {lease.number} has blocks that do not exist", field="block_ids")
        if (self._cache.state is not None) != (lease.state_slot >= 0) or lease.state_slot >= shape.state_slots:
            raise InternalError(
                f"lease {lease.number} has state slot {lease.state_slot}, and the cache has {shape.state_slots}",
                field="state_slot",
                value=lease.state_slot,
            )

    def _call(self, function: Callable[["Future[T]"], None]) -> "asyncio.Future[T]":
        """Runs a function on the thread; it, or what it begins, completes the future."""
        return asyncio.wrap_future(self._thread.call(function))

    async def _ended(self, begin: Callable[["Future[T]"], None], *, is_urgent: bool = True) -> T:
        """Awaits saves or a load. If the caller is cancelled, ends them, and waits until nothing uses their blocks."""
        job = self._thread.call(begin, is_urgent=is_urgent)
        over = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(over)
        except asyncio.CancelledError:

            def stop(future: "Future[None]") -> None:
                self._thread.offloader.stop(job)
                future.set_result(None)

            self._thread.call(stop)
            await until_done(over)
            raise

    def _post(self, callback: Callable[[T], None], event: T) -> None:
        """Calls back on the event loop, from the thread."""
        assert self._loop is not None
        # The loop of a process that is ending may be closed before the thread is.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, event)
