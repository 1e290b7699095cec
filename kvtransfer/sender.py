"""The sending half of the transfer thread: cut, gather, send, several staging slots at a time.

A slot is given back when its own segment has ended. The thread calls `step` repeatedly.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from baton.core.errors import BatonError, Cancelled, DataLoss, UnknownLease
from baton.kvcache.cache import PagedKVCache
from kvtransfer.cutting import segments_of
from kvtransfer.ledger import Ledger, Peer
from kvtransfer.movers.mover import Mover, Pending
from kvtransfer.parts import part_with
from kvtransfer.records import SendJob, WarmUp
from kvtransfer.segments import LEASE_KEY_BYTES, TRAILER_BYTES, Segment, Tag
from kvtransfer.settings import TransferSettings
from kvtransfer.staging import Pools, Slot, StagingPool
from kvtransfer.transports.transport import TransferRequest, Transport
from kvtransfer.warm_up import maps_slot, pattern, warm_up_segments

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    """Segments for one peer, sent in order.

    Attributes:
        lease: None for a warm-up.
        fill: puts a segment's message into a slot.
        done: called when no segment is in flight and none will follow.
    """

    peer: int
    sender_number: int
    lease: int | None
    pool: StagingPool
    segments: Iterator[Segment]
    fill: Callable[[Slot, Segment], Pending]
    done: Callable[["_Job"], None]
    sent: list[Segment] = field(default_factory=list)
    in_flight: int = 0
    exhausted: bool = False
    error: BatonError | None = None

    def stop(self, error: BatonError) -> None:
        self.error = self.error or error
        self.exhausted = True


@dataclass(eq=False)
class _InFlight:
    """One segment, while it holds a slot:

    message ──► request ──► over           the request begins when the message is in the slot; if the job has been
       └───────────────────► over          stopped by then, the segment is not sent
    """

    job: _Job
    slot: Slot
    segment: Segment
    message: Pending
    request: TransferRequest | None = None


class Sender:
    """Sends each peer's jobs in the order in which they were queued."""

    def __init__(
        self,
        cache: PagedKVCache,
        mover: Mover,
        transport: Transport,
        ledger: Ledger,
        pools: Pools,
        settings: TransferSettings,
    ) -> None:
        self._parts = settings.parts(cache.spec)
        self._mover = mover
        self._transport = transport
        self._ledger = ledger
        self._pools = pools
        self._digests = settings.digests
        self._jobs: list[_Job] = []
        self._in_flight: list[_InFlight] = []
        self._slots_held: Counter[int] = Counter()
        self._quiet_waiters: list[tuple[int, int, Future[None]]] = []

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def send(self, job: SendJob, future: "Future[tuple[Segment, ...]]") -> None:
        """Queues a job. The future gets its segments once all are complete, or the error once none is in flight; either
        way no gather reads the job's blocks any more."""
        peer = self._ledger.peers.get(job.peer)
        if peer is None:
            future.set_exception(DataLoss("the peer is not connected", field="peer", value=job.peer))
            return
        if peer.sealed and len(job.key) != LEASE_KEY_BYTES:
            future.set_exception(_no_key(job))
            return
        try:
            blocks = self._mover.place(job.block_ids, incoming=False, state_slot=job.state_slot)
        except BatonError as error:
            future.set_exception(error)
            return

        def fill(slot: Slot, segment: Segment) -> Pending:
            part = part_with(self._parts, range(segment.layer_start, segment.layer_stop))
            assert part is not None, "pieces lie in one part"
            converter = None if part.number else peer.converter
            return self._mover.gather(
                slot, blocks, segment, part.place(segment), with_digest=self._digests, converter=converter
            )

        def done(finished: _Job) -> None:
            blocks.free()
            # Messages can become ready out of order.
            _complete(future, tuple(sorted(finished.sent, key=attrgetter("number"))), finished.error)

        pool, segments = self._pools.of(through_host=peer.through_host), self._cut(job, peer)
        self._jobs.append(_Job(job.peer, job.sender_number, job.lease, pool, segments, fill, done))

    def warm_up(self, peer_number: int, sender_number: int, future: "Future[WarmUp]") -> None:
        """Queues warm-up messages through every slot. The future gets their number and payload bytes."""
        peer = self._ledger.peers.get(peer_number)
        if peer is None:
            future.set_exception(DataLoss("the peer is not connected", field="peer", value=peer_number))
            return

        def fill(slot: Slot, segment: Segment) -> Pending:
            value = pattern(segment.lease) if maps_slot(segment.lease) else None
            return self._mover.fill(slot, segment, value, with_digest=self._digests)

        def done(finished: _Job) -> None:
            sent = WarmUp(len(finished.sent), sum(segment.payload_bytes for segment in finished.sent))
            _complete(future, sent, finished.error)

        pool = self._pools.of(through_host=peer.through_host)
        segments = warm_up_segments(pool.slots, peer.payload_limit, time.monotonic)
        self._jobs.append(_Job(peer_number, sender_number, None, pool, segments, fill, done))

    def quiet(self, peer: int, lease: int, future: "Future[None]") -> None:
        """Ends the lease's jobs. The future is done when nothing of the lease is in flight."""
        for job in self._jobs:
            if (job.peer, job.lease) == (peer, lease):
                job.stop(Cancelled(f"lease {lease} was ended"))
        self._quiet_waiters.append((peer, lease, future))
        self._finish_jobs()

    def lost(self, peer: int) -> None:
        """Ends all jobs of a peer. The caller then has the transport cancel what is in flight."""
        for job in self._jobs:
            if job.peer == peer:
                job.stop(DataLoss("the link to the peer was closed"))
        self._finish_jobs()

    def holds(self, peer: int) -> bool:
        """Whether anything for that peer is in flight."""
        return self._slots_held[peer] > 0

    def step(self) -> bool:
        """Advances segments in flight and begins at most one more. Returns whether anything happened."""
        if not self._jobs and not self._in_flight:
            return False
        moved = False
        for item in tuple(self._in_flight):
            moved = self._advance(item) or moved
        return self._begin_one() or moved

    def _begin_one(self) -> bool:
        ready = (job for job in self._jobs if not job.exhausted and self._has_room(job))
        job = next(ready, None)
        if job is None:
            return False
        slot = job.pool.take()
        assert slot is not None
        try:
            segment = next(job.segments, None)
            if segment is not None:
                self._begin(job, slot, segment)
                return True
            job.exhausted = True
        except BatonError as error:
            job.stop(error)
        job.pool.give_back(slot)
        self._finish_jobs()
        return True

    def _has_room(self, job: _Job) -> bool:
        return job.pool.available > 0 and self._slots_held[job.peer] < self._ledger.fair_share(job.pool.slots)

    def _begin(self, job: _Job, slot: Slot, segment: Segment) -> None:
        item = _InFlight(job, slot, segment, job.fill(slot, segment))
        job.in_flight += 1
        self._slots_held[job.peer] += 1
        self._in_flight.append(item)
        self._advance(item)

    def _advance(self, item: _InFlight) -> bool:
        """Advances one segment as far as possible without waiting. Returns whether it advanced."""
        moved = False
        if item.request is None:
            if not item.message.done:
                return False
            if item.job.error is not None:
                return self._end(item)
            item.request = self._post(item)
            moved = True
        if not item.request.done:
            return moved
        failure = item.request.failure()
        if failure is not None:
            item.job.stop(failure)
        elif item.job.lease is not None:
            self._ledger.moved(item.job.peer, item.segment.payload_bytes)
        return self._end(item)

    def _post(self, item: _InFlight) -> TransferRequest:
        segment, job = item.segment, item.job
        tag = Tag.of(job.sender_number, segment).pack()
        job.sent.append(segment)
        return self._transport.send(job.peer, tag, item.slot.message(segment.payload_bytes + TRAILER_BYTES))

    def _end(self, item: _InFlight) -> bool:
        """Ends a segment, whose slot is free then."""
        self._in_flight.remove(item)
        item.job.in_flight -= 1
        self._slots_held[item.job.peer] -= 1
        item.job.pool.give_back(item.slot)
        self._finish_jobs()
        return True

    def _finish_jobs(self) -> None:
        finished = [job for job in self._jobs if job.exhausted and job.in_flight == 0]
        if finished:
            self._jobs = [job for job in self._jobs if job not in finished]
        for job in finished:
            job.done(job)
        live = {(job.peer, job.lease) for job in self._jobs}
        waiting = []
        for peer, lease, future in self._quiet_waiters:
            if (peer, lease) in live:
                waiting.append((peer, lease, future))
            else:
                future.set_result(None)
        self._quiet_waiters = waiting

    def _cut(self, job: SendJob, peer: Peer) -> Iterator[Segment]:
        kv, *others = self._parts
        if peer.converter is not None:
            kv = replace(kv, spec=peer.converter.spec)
        payload_for = partial(peer.payload_bytes_for, handling_s=self._mover.handling_s)
        return segments_of(job, (kv, *others), payload_for=payload_for, is_sealed=peer.sealed)


def _no_key(job: SendJob) -> BatonError:
    return UnknownLease(
        f"the ticket's key has {len(job.key)} bytes, and the decode node takes sealed segments only",
        field="key",
        value=len(job.key),
        allowed=(f"{LEASE_KEY_BYTES} bytes",),
        cure="use the same version on all nodes and gateways",
    )


def _complete(future: "Future[T]", result: T, error: BatonError | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
