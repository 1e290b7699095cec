"""The sending half of the transfer thread: cut, gather, digest, send, several slots at a time.

Each slot goes back by its own send's completion. Knows nothing of leases' states, and nothing of threads: `step` is
called again and again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from attention.cache import PagedKVCache
from attention.cache_ops import digest, gather_to_wire
from baton.errors import BatonError, Cancelled, ConfigError, DataLoss
from kvtransfer.records import Ledger, Peer, SendJob, WarmUp
from kvtransfer.segments import TRAILER_BYTES, WARM_UP, Segment, Tag, cut, payload_bytes
from kvtransfer.staging import Slot, StagingPool
from kvtransfer.transport import Request, Transport
from kvtransfer.warm_up import pattern, warm_up_segments

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    """Segments for one peer, sent in order. `lease` is None for a warm-up. `done` is told when none is in flight and
    none will follow."""

    peer: int
    sender_number: int
    lease: int | None
    segments: Iterator[Segment]
    fill: Callable[[Segment, Tensor], None]
    done: Callable[["_Job"], None]
    sent: list[Segment] = field(default_factory=list)
    in_flight: int = 0
    exhausted: bool = False
    error: BatonError | None = None

    def stop(self, error: BatonError) -> None:
        self.error = self.error or error
        self.exhausted = True


@dataclass(frozen=True)
class _InFlight:
    job: _Job
    slot: Slot
    request: Request
    payload_bytes: int


class Sender:
    """Sends jobs, first come first served for each peer.

    Args:
        make_pool: makes the staging pool when it is first needed: a node that only receives has none.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        transport: Transport,
        ledger: Ledger,
        make_pool: Callable[[], StagingPool],
        *,
        digests: bool,
    ) -> None:
        self._cache = cache
        self._transport = transport
        self._ledger = ledger
        self._make_pool = make_pool
        self._pool: StagingPool | None = None
        self._digests = digests
        self._jobs: list[_Job] = []
        self._in_flight: list[_InFlight] = []
        self._held: Counter[int] = Counter()
        self._quiet_waiters: list[tuple[int, int, Future[None]]] = []

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def send(self, job: SendJob, future: "Future[tuple[Segment, ...]]") -> None:
        """Queues a job; the future gets its segments when all are complete, or the error when none is in flight."""
        peer = self._ledger.peers.get(job.peer)
        if peer is None:
            future.set_exception(DataLoss("the peer is not connected", field="peer", value=job.peer))
            return
        block_ids = torch.tensor(job.block_ids, dtype=torch.int64, device=self._cache.view.device)

        def fill(segment: Segment, payload: Tensor) -> None:
            gather_to_wire(
                self._cache,
                block_ids=block_ids,
                token_start=segment.token_start,
                token_stop=segment.token_stop,
                layers=segment.layers,
                heads=segment.heads,
                out=payload,
            )

        def done(finished: _Job) -> None:
            _tell(future, tuple(finished.sent), finished.error)

        segments = self._cut(job, peer)
        self._jobs.append(_Job(job.peer, job.sender_number, job.lease, segments, fill, done))

    def warm_up(self, peer_number: int, sender_number: int, future: "Future[WarmUp]") -> None:
        """Queues messages through every slot; the future gets their number and payload bytes."""
        peer = self._ledger.peers.get(peer_number)
        if peer is None:
            future.set_exception(DataLoss("the peer is not connected", field="peer", value=peer_number))
            return

        def fill(segment: Segment, payload: Tensor) -> None:
            payload.copy_(pattern(segment.lease, payload.numel(), payload.device))

        def done(finished: _Job) -> None:
            sent = WarmUp(len(finished.sent), sum(segment.payload_bytes for segment in finished.sent))
            _tell(future, sent, finished.error)

        segments = warm_up_segments(self._staging().slots, peer.payload_limit)
        self._jobs.append(_Job(peer_number, sender_number, None, segments, fill, done))

    def quiet(self, peer: int, lease: int, future: "Future[None]") -> None:
        """Ends the lease's jobs; the future is done when nothing of it is in flight."""
        for job in self._jobs:
            if (job.peer, job.lease) == (peer, lease):
                job.stop(Cancelled(f"lease {lease} was ended"))
        self._quiet_waiters.append((peer, lease, future))
        self._finish_jobs()

    def lost(self, peer: int) -> None:
        """Ends all jobs of a peer; the transport is to cancel what is in flight."""
        for job in self._jobs:
            if job.peer == peer:
                job.stop(DataLoss("the link to the peer was closed"))
        self._finish_jobs()

    def holds(self, peer: int) -> bool:
        """Whether anything of that peer is in flight."""
        return self._held[peer] > 0

    def step(self) -> bool:
        """Collects what is complete and sends at most one segment; whether there was anything to do."""
        if not self._jobs and not self._in_flight:
            return False
        collected = self._collect()
        return self._send_one() or collected

    def _collect(self) -> bool:
        waiting = []
        for item in self._in_flight:
            if not item.request.done:
                waiting.append(item)
                continue
            failure = item.request.failure()
            if failure is not None:
                item.job.stop(failure)
            elif item.job.lease is not None:
                self._ledger.moved(item.job.peer, item.payload_bytes)
            item.job.in_flight -= 1
            self._held[item.job.peer] -= 1
            self._staging().give_back(item.slot)
        collected = len(waiting) < len(self._in_flight)
        self._in_flight = waiting
        if collected:
            self._finish_jobs()
        return collected

    def _send_one(self) -> bool:
        share = self._ledger.fair_share(self._staging().slots)
        ready = (job for job in self._jobs if not job.exhausted and self._held[job.peer] < share)
        job = next(ready, None)
        slot = self._staging().take() if job is not None else None
        if job is None or slot is None:
            return False
        try:
            segment = next(job.segments, None)
            if segment is not None:
                self._send_segment(job, slot, segment)
                return True
            job.exhausted = True
        except BatonError as error:
            job.stop(error)
        self._staging().give_back(slot)
        self._finish_jobs()
        return True

    def _send_segment(self, job: _Job, slot: Slot, segment: Segment) -> None:
        end = segment.payload_bytes
        payload = slot.memory[:end]
        job.fill(segment, payload)
        if self._digests:
            segment = segment.sealed(digest(payload, between=self._transport.progress))
        trailer = torch.frombuffer(bytearray(segment.encode()), dtype=torch.uint8)
        slot.memory[end : end + TRAILER_BYTES].copy_(trailer)
        tag = Tag(job.sender_number, segment.lease, segment.number).pack()
        request = self._transport.send(job.peer, tag, slot.memory[: end + TRAILER_BYTES])
        job.sent.append(segment)
        job.in_flight += 1
        self._held[job.peer] += 1
        self._in_flight.append(_InFlight(job, slot, request, end))

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
        spec = self._cache.spec
        pieces = cut(spec, segment_bytes=peer.payload_limit, token_start=job.token_start, token_stop=job.token_stop)
        for number, (layers, start, stop) in enumerate(pieces, start=job.first_segment):
            if number >= WARM_UP:
                raise ConfigError(
                    f"lease {job.lease} needs more than {WARM_UP} segments",
                    field="segment_bytes",
                    value=peer.payload_limit,
                    cure="raise --segment-mib",
                )
            heads = spec.num_kv_heads
            size = payload_bytes(spec, layers=len(layers), tokens=stop - start, heads=heads)
            yield Segment(job.incarnation, job.lease, number, layers.start, layers.stop, start, stop, 0, heads, size)

    def _staging(self) -> StagingPool:
        if self._pool is None:
            self._pool = self._make_pool()
        return self._pool


def _tell(future: "Future[T]", result: T, error: BatonError | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
