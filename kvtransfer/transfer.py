"""A node's KV transfer as the event loop sees it: connect, warm up, send, open and close leases.

Owns one thread (`kvtransfer.worker`), which owns everything that moves bytes; the two exchange messages only. Knows
neither engine nor grpc nor role.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from baton.errors import ConfigError, DeadlineExceeded, InternalError
from kvcache.cache import PagedKVCache
from kvcache.wire.conversion import Converter, open_converter
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant, LeaseTotals, Refusal
from kvtransfer.link import LinkSpeed
from kvtransfer.movers.mover import MakeMover
from kvtransfer.movers.table import open_mover
from kvtransfer.records import LinkMeasure, Peer, PeerTraffic, SegmentRefused, SendJob, TransferCounters, WarmUp
from kvtransfer.segments import TRAILER_BYTES, Segment, check_segment_bytes
from kvtransfer.worker import TransferThread

# The totals of a lease at the moment when it became complete, and what the sender tells of a segment that it sent: all
# but the digest, which only the message has.
LeaseFilled = LeaseTotals
SentSegment = Segment

__all__ = [
    "KVTransfer",
    "LeaseFilled",
    "LeaseGrant",
    "LeaseTotals",
    "LinkMeasure",
    "LinkSpeed",
    "PeerTraffic",
    "Refusal",
    "SegmentRefused",
    "SendJob",
    "SentSegment",
    "TransferCounters",
    "WarmUp",
]


T = TypeVar("T")


class KVTransfer:
    """Everything that a node sends and receives of KV. One for each process; an async context manager.

    All methods are for the event loop that `start` ran on; callbacks come on it too, in order.

    Args:
        heads: of the model's kv heads, those in the cache, which is one rank's; all if not given.
        incarnation: of this node; a segment for another one is refused.
        transport: a name of `kvtransfer.transports.transport`.
        segment_bytes: largest payload of one message; the size of a staging slot.
        staging_slots: how many of them, for each direction that is used.
        digests: whether segments are sent with a digest, and refused without the right one.
        receive_bytes_per_s: how much is received of segments, on average; unlimited if not given. More waits at the
            senders.
        on_filled: a lease has all its tokens; called once, unless the lease is closed before.
        on_refused: a message was not scattered and its lease cannot be trusted to become complete.
        make_mover: what moves KV between cache and staging; the one for where the cache is, if not given.

    Raises:
        ConfigError: a size that cannot work with this cache.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        heads: range | None = None,
        incarnation: int,
        transport: str = "ucx",
        segment_bytes: int,
        staging_slots: int,
        digests: bool,
        receive_bytes_per_s: float | None = None,
        on_filled: Callable[[LeaseFilled], None],
        on_refused: Callable[[SegmentRefused], None],
        make_mover: MakeMover = open_mover,
    ) -> None:
        check_segment_bytes(cache.spec, segment_bytes)
        if staging_slots < 1:
            raise ConfigError(
                f"staging_slots is {staging_slots}",
                field="staging_slots",
                value=staging_slots,
                allowed=("an integer of at least 1",),
            )
        self.message_bytes = segment_bytes + TRAILER_BYTES
        self._cache = cache
        self._loop: asyncio.AbstractEventLoop | None = None
        self._highest_lease = -1
        self._thread = TransferThread(
            cache,
            heads=range(cache.spec.num_kv_heads) if heads is None else heads,
            transport=transport,
            incarnation=incarnation,
            segment_bytes=segment_bytes,
            staging_slots=staging_slots,
            digests=digests,
            receive_bytes_per_s=receive_bytes_per_s,
            make_mover=make_mover,
            on_filled=lambda filled: self._tell(on_filled, filled),
            on_refused=lambda refused: self._tell(on_refused, refused),
        )

    async def start(self) -> None:
        """Starts the thread and opens the transport.

        Raises:
            ConfigError: no such transport.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.wrap_future(self._thread.start())

    async def close(self) -> None:
        """Cancels what is in flight and ends the thread; every call still waiting gets an error."""
        await asyncio.to_thread(self._thread.stop)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def listen(self, peer: int) -> bytes:
        """Opens this node's end for one peer; returns the address for that peer's `connect`, to be given to no other.

        Args:
            peer: at the receiver, the sender number it drew for that peer; at the sender, its own number for it.
        """
        return await self._call(lambda future: self._thread.listen(peer, future))

    async def connect(
        self,
        peer: int,
        address: bytes,
        *,
        message_bytes: int | None = None,
        group: int | None = None,
        conversion: KVConversion | None = None,
    ) -> None:
        """Makes the endpoint to a peer that is listened to.

        Args:
            message_bytes: the largest message that the peer takes; this node's own `message_bytes` if not given.
            group: which peers that fill leases together have in common; the peer alone if not given.
            conversion: what KV sent to this peer becomes; it stays as it is if not given.

        Raises:
            PeerRefused: that is no address of this node's transport.
            ConfigError: no segment fits into the peer's messages.
        """
        limit = self.message_bytes if message_bytes is None else min(message_bytes, self.message_bytes)
        converter: Converter | None = None
        if conversion is not None:
            # On a GPU it waits, and compiles: not for the transfer thread, which has other peers.
            to, scales = conversion.target_dtype, conversion.scales
            converter = await asyncio.to_thread(open_converter, self._cache, to, scales)
        check_segment_bytes(converter.spec if converter else self._cache.spec, limit - TRAILER_BYTES)
        wanted = Peer(peer, limit - TRAILER_BYTES, group=group, converter=converter)
        await self._call(lambda future: self._thread.connect(wanted, address, future))

    async def disconnect(self, peer: int) -> tuple[int, ...]:
        """Closes the link; returns when nothing of the peer is in flight, whether it is alive or not.

        Returns:
            The open leases that this peer or its group had begun to fill: nobody will complete them.
        """
        return await self._call(lambda future: self._thread.disconnect(peer, future))

    async def warm_up(self, peer: int, sender_number: int) -> WarmUp:
        """Sends messages through every staging slot; for the sender, once the receiver has connected.

        Raises:
            DataLoss: the link failed.
        """
        return await self._call(lambda future: self._thread.sender.warm_up(peer, sender_number, future))

    async def warmed_up(self, peer: int, messages: int, bytes: int, *, timeout_s: float) -> LinkMeasure:
        """Waits for a peer's warm-up messages, checks and times them; then measures the latency by round trips.

        Raises:
            DataLoss: they came damaged, or not as many as the peer says.
            PeerRefused: they came without digests, and this node wants them.
            DeadlineExceeded: they did not all come in time.
        """
        waiting: asyncio.Future[LinkMeasure] = self._begin(
            lambda future: self._thread.expect_warm_up(peer, messages, bytes, future)
        )
        awaited = f"{messages} warm-up messages"
        try:
            async with asyncio.timeout(timeout_s):
                measure = await waiting
                awaited = "answers to pings"
                latency_s: float = await self._call(lambda future: self._thread.measure_latency(peer, future))
                return replace(measure, latency_s=latency_s)
        except TimeoutError:
            raise DeadlineExceeded(f"{awaited} did not arrive within {timeout_s:g} s") from None

    async def use_link(self, peer: int, link: LinkSpeed) -> None:
        """What the receiver has measured: jobs for it are cut to segments of the size that suits them, in place of the
        largest."""
        await self._call(lambda future: self._thread.use_link(peer, link, future))

    async def send(self, job: SendJob) -> tuple[SentSegment, ...]:
        """Sends one job; returns when all of it is complete at the transport, so that its blocks may be freed: then
        also every gather that read them is over, on a GPU too.

        A cancelled call ends the job; `quiet` then waits until nothing of it is in flight.

        Raises:
            DataLoss: the link failed, or is not there. Nothing of the job is in flight then.
            Cancelled: `quiet` has ended it.
        """
        try:
            return await self._call(lambda future: self._thread.sender.send(job, future))
        except asyncio.CancelledError:
            self._thread.call(lambda future: self._thread.sender.quiet(job.peer, job.lease, future))
            raise

    async def quiet(self, peer: int, lease: int) -> None:
        """Ends what is queued for a lease; returns when nothing of it is in flight and nothing reads its blocks."""
        await self._call(lambda future: self._thread.sender.quiet(peer, lease, future))

    def open_lease(self, lease: LeaseGrant) -> "asyncio.Future[None]":
        """Lets one peer fill these tokens; the future is done when that is so, and cancelling it changes nothing.
        A lease without tokens is filled at once.

        Nothing else may read or write the blocks' slots from now on until `on_filled` or the return of `close_lease`,
        a step that was launched earlier and still runs on a GPU included: scatters know nothing of its stream. At
        `on_filled` every scatter is over on the device, and not only queued.

        Raises:
            InternalError: its number is not above all earlier ones, or its blocks cannot hold its tokens.
        """
        self._check_grant(lease)
        self._highest_lease = lease.number

        def opened(future: "Future[None]") -> None:
            self._thread.receiver.open(lease)
            future.set_result(None)

        return asyncio.shield(self._begin(opened))

    async def close_lease(self, number: int) -> LeaseTotals:
        """Ends a lease; when this returns, nothing is being written to its blocks or ever will be, on a GPU too.

        Raises:
            UnknownLease: it is not open.
        """
        return await self._call(lambda future: self._thread.receiver.close(number, future))

    def counters(self) -> TransferCounters:
        return self._thread.ledger.snapshot()

    def stuck(self, *, after_s: float) -> str:
        """Where the thread has been stuck for that long, as a Python stack, or that it has failed; empty while all is
        well."""
        return self._thread.where() if self._thread.stalled_s > after_s else ""

    def _check_grant(self, lease: LeaseGrant) -> None:
        shape = self._cache.shape
        if lease.number <= self._highest_lease:
            raise InternalError(
                f"lease {lease.number} was opened after lease {self._highest_lease}",
                field="number",
                value=lease.number,
                allowed=(f"above {self._highest_lease}",),
            )
        if lease.token_stop > len(lease.block_ids) * shape.block_size:
            raise InternalError(
                f"lease {lease.number} has {len(lease.block_ids)} blocks of {shape.block_size} "
                f"for {lease.token_stop} tokens",
                field="block_ids",
            )
        if any(not 0 <= block < shape.num_blocks for block in lease.block_ids):
            raise InternalError(f"lease {lease.number} has blocks that do not exist", field="block_ids")

    async def _call(self, function: Callable[["Future[T]"], None]) -> T:
        return await self._begin(function)

    def _begin(self, function: Callable[["Future[T]"], None]) -> "asyncio.Future[T]":
        return asyncio.wrap_future(self._thread.call(function))

    def _tell(self, callback: Callable[[T], None], event: T) -> None:
        assert self._loop is not None
        # The loop of a process that is ending may be closed before the thread is.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, event)
