"""KV segments on their way from one simulated cache to another: each alone, in any order, some twice, late or damaged.

The receiver's lease table is the real one. Segments that it accepts are compared with an own record of the lease (I3).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from baton.core.errors import BatonError, Cancelled, DataLoss, UnknownLease
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.cutting import segments_of
from kvtransfer.leases import LeaseGrant, LeaseTable, LeaseTotals
from kvtransfer.parts import parts_of
from kvtransfer.records import SendJob
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import Segment, Tag
from tests.simulation.clock import Clock
from tests.simulation.device import Device
from tests.simulation.invariants import violated
from tests.simulation.network import Life, Network
from tests.simulation.reference import NUM_LAYERS, UNWRITTEN
from tests.simulation.weather import Weather

SPEC = KVCacheSpec(KVKind.MLA, num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=1, dtype="float32")
PARTS = parts_of(SPEC)


@dataclass(frozen=True)
class Message:
    """A segment with the content of its cells, layer by layer."""

    tag: Tag
    segment: Segment
    cells: tuple[tuple[int, ...], ...]
    damaged: bool = False


# ---- the sending side


@dataclass(eq=False)
class Link:
    """The link from one prefill node to one decode node's receiver, for as long as their pair lives."""

    life: Life
    address: str
    sender_number: int
    receiver: "Receiver"
    up: bool = True


@dataclass(eq=False)
class _Job:
    request_id: str
    job: SendJob
    segments: Iterator[Segment]
    generations: list[int]
    on_over: Callable[[Sequence[Segment], BatonError | None], None]
    sent: list[Segment] = field(default_factory=list)
    in_flight: int = 0
    exhausted: bool = False
    error: BatonError | None = None


class Sender:
    """Sends jobs segment by segment, two at a time for each job."""

    def __init__(
        self, life: Life, network: Network, random: Random, device: Device, weather: Weather, *, segment_bytes: int
    ) -> None:
        self.links: dict[int, Link] = {}
        self._life = life
        self._network = network
        self._random = random
        self._device = device
        self._weather = weather
        self._segment_bytes = segment_bytes
        self._jobs: list[_Job] = []
        self._quiet: list[tuple[int, int, Callable[[], None]]] = []

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._quiet)

    def send(
        self, request_id: str, job: SendJob, on_over: Callable[[Sequence[Segment], BatonError | None], None]
    ) -> None:
        """`on_over` gets the segments when all are complete, or the error when no segment is in flight any more."""
        if job.peer not in self.links:
            self._life.after(0.0, partial(on_over, (), DataLoss("the peer is not connected")))
            return
        segments = segments_of(job, PARTS, payload_for=lambda _: self._segment_bytes, is_sealed=False)
        begun = _Job(request_id, job, segments, self._device.cache.held(job.block_ids), on_over)
        self._jobs.append(begun)
        for _ in range(2):
            self._life.after(0.002 * self._random.random(), partial(self._begin, begun))

    def quiet(self, peer: int, lease: int, on_quiet: Callable[[], None]) -> None:
        """Ends the lease's jobs; `on_quiet` is called when nothing of it is in flight."""
        self._stop((peer, lease), Cancelled(f"lease {lease} was ended"))
        self._quiet.append((peer, lease, on_quiet))
        self._finish()

    def disconnect(self, peer: int) -> None:
        """Closes the link: what is in flight is cancelled."""
        link = self.links.pop(peer, None)
        if link is None:
            return
        link.up = False
        for job in self._jobs:
            if job.job.peer == peer:
                job.in_flight = 0
                job.exhausted, job.error = True, job.error or DataLoss("the link to the peer was closed")
        self._finish()

    def check(self) -> None:
        """I1: no other request has the blocks of a job."""
        for job in self._jobs:
            if self._device.cache.held(job.job.block_ids) != job.generations:
                violated("I1", f"{self._life.address}: blocks that are sent for lease {job.job.lease} were taken")

    def _stop(self, lease: tuple[int, int], error: BatonError) -> None:
        for job in self._jobs:
            if (job.job.peer, job.job.lease) == lease:
                job.exhausted, job.error = True, job.error or error

    def _begin(self, job: _Job) -> None:
        link = self.links.get(job.job.peer)
        if job.exhausted or link is None:
            return
        segment = next(job.segments, None)
        if segment is None:
            job.exhausted = True
            self._finish()
            return
        job.in_flight += 1
        job.sent.append(segment)
        self._transmit(link, self._gather(job, segment), partial(self._complete, job))

    def _complete(self, job: _Job) -> None:
        if job.in_flight:  # else the link was closed
            job.in_flight -= 1
            self._begin(job)
            self._finish()

    def _gather(self, begun: _Job, segment: Segment) -> Message:
        job = begun.job
        layers, size = self._device.cache.layers, self._device.cache.block_size
        cells = tuple(
            tuple(
                layers[layer][job.block_ids[token // size]][token % size]
                for token in range(segment.token_start, segment.token_stop)
            )
            for layer in segment.layers
        )
        if any(UNWRITTEN in row for row in cells):
            violated("I2", f"{self._life.address}: a segment of lease {segment.lease} has tokens not computed yet")
        return Message(Tag(job.sender_number, segment.lease, segment.number), segment, cells)

    def _transmit(self, link: Link, message: Message, on_complete: Callable[[], None]) -> None:
        random, weather = self._random, self._weather
        eager = random.random() < 0.5
        if eager:
            self._life.after(0.0, on_complete)
        arrived = partial(self._life.after, self._network.delay_s(), on_complete)
        if random.random() < weather.damaged:
            message = replace(message, damaged=True)
        self._arrive(link, message, None if eager else arrived)
        if random.random() < weather.duplicated:
            self._arrive(link, message, None)
        if random.random() < weather.late:
            # A late message: it reaches the process that has the address then, under the same number.
            self._network.clock.after(weather.late_s * random.random(), partial(self._arrive_late, link, message))

    def _arrive(self, link: Link, message: Message, on_arrived: Callable[[], object] | None) -> None:
        clock = self._network.clock

        def arrive() -> None:
            stalled_s = self._network.stalled_until_s((self._life.address, link.address))
            if stalled_s > clock.now_s:
                clock.at(stalled_s, arrive)
            elif link.up:
                link.receiver.life.run(receive)

        def receive() -> None:
            if link.receiver.arrived(link.sender_number, message) and on_arrived is not None:
                on_arrived()

        clock.after(self._network.delay_s(), arrive)

    def _arrive_late(self, link: Link, message: Message) -> None:
        receiver = link.receiver.successor()
        if receiver is not None:
            receiver.life.run(partial(receiver.arrived, message.tag.sender, message))

    def _finish(self) -> None:
        over = [job for job in self._jobs if job.exhausted and job.in_flight == 0]
        if over:
            self._jobs = [job for job in self._jobs if job not in over]
        for job in over:
            self._life.after(0.0, partial(job.on_over, tuple(job.sent), job.error))
        live = {(job.job.peer, job.job.lease) for job in self._jobs}
        for peer, lease, on_quiet in self._quiet:
            if (peer, lease) not in live:
                self._life.after(0.0, on_quiet)
        self._quiet = [item for item in self._quiet if item[:2] in live]


# ---- the receiving side


@dataclass
class _Written:
    """The receiver's own record of a lease, independent of the lease table."""

    grant: LeaseGrant
    generations: list[int]
    cells: set[tuple[int, int]] = field(default_factory=set)  # layer and token


class Receiver:
    """Fills leases of one decode node with arriving segments.

    Args:
        successor: the receiver that has this one's address now.
        on_filled, on_refused: called as the transfer's callbacks are.
    """

    def __init__(
        self,
        life: Life,
        clock: Clock,
        random: Random,
        device: Device,
        *,
        successor: Callable[[], "Receiver | None"],
        on_filled: Callable[[LeaseTotals], None],
        on_refused: Callable[[int, BatonError], None],
    ) -> None:
        self.life = life
        self.peers: dict[int, int] = {}  # incarnations by the pair's number
        self.successor = successor
        self.leases = LeaseTable(PARTS, incarnation=life.incarnation)
        self._clock = clock
        self._random = random
        self._device = device
        self._on_filled = on_filled
        self._on_refused = on_refused
        self._known: dict[int, _Written] = {}
        self._closing: dict[int, Callable[[LeaseTotals], None]] = {}
        self._posted_s = 0.0

    def open(self, grant: LeaseGrant, on_open: Callable[[], None]) -> None:
        def opened() -> None:
            self._known[grant.number] = _Written(grant, self._device.cache.held(grant.block_ids))
            filled = self.leases.open(grant)
            if filled is not None:
                self._on_filled(filled)
            on_open()

        self._post(opened)

    def close(
        self, number: int, on_closed: Callable[[LeaseTotals], None], on_error: Callable[[BatonError], None]
    ) -> None:
        def close() -> None:
            try:
                totals = self.leases.close(number)
            except UnknownLease as error:
                on_error(error)
                return
            self._closing[number] = on_closed
            if totals is not None:
                self._closed(totals)

        self._post(close)

    def disconnect(self, peer: int) -> tuple[int, ...]:
        """Forgets a peer; returns the open leases that it had begun to fill."""
        self.peers.pop(peer, None)
        return self.leases.bound_to(peer)

    def arrived(self, peer: int, message: Message) -> bool:
        """Receives a message of that peer; returns whether it is scattered at once."""
        tag = message.tag
        refusal = (
            SegmentRefusal.UNKNOWN_SENDER
            if tag.sender != peer or peer not in self.peers
            else self.leases.arrival(tag, self._clock.now_s, group=peer, incarnation=self.peers[peer])
        )
        if refusal is not None:
            self._refuse(tag, refusal)
        else:
            self.life.after(0.001 * self._random.random(), partial(self._received, message))
        return True

    def check(self) -> None:
        """I3: the blocks of a lease that is not closed are held, and are the blocks that it was opened for."""
        for number, known in self._known.items():
            if self._device.cache.held(known.grant.block_ids) != known.generations:
                violated("I3", f"{self.life.address}: blocks were taken from lease {number}, which is not closed")

    def check_not_leased(self, blocks: Sequence[int], who: str) -> None:
        """I3: no segment is scattered into blocks that attention reads."""
        for number, known in self._known.items():
            size = self._device.cache.block_size
            leased = known.grant.block_ids[known.grant.token_start // size :]
            if not set(leased).isdisjoint(blocks):
                violated("I3", f"{self.life.address}: {who} begins to read blocks of lease {number}, which is open")

    def _post(self, action: Callable[[], None]) -> None:
        """Runs callbacks in order, a little later: the real transfer is another thread."""
        self._posted_s = max(self._posted_s, self._clock.now_s + 0.001 * self._random.random())
        self._clock.at(self._posted_s, partial(self.life.run, action))

    def _received(self, message: Message) -> None:
        tag, segment = message.tag, message.segment
        if tag.sender not in self.peers:
            return  # its link was closed before the whole message had arrived
        refusal = SegmentRefusal.DIGEST if message.damaged else self.leases.start_scatter(tag, segment)
        if refusal is not None:
            self._refuse(tag, refusal)
            return
        self._check_scatter(tag, segment)
        self.life.after(0.001 * self._random.random(), partial(self._scatter, message))

    def _scatter(self, message: Message) -> None:
        segment = message.segment
        self._check_scatter(message.tag, segment)
        known = self._known[segment.lease]
        blocks, size = known.grant.block_ids, self._device.cache.block_size
        for layer, row in zip(segment.layers, message.cells, strict=True):
            for token, value in zip(range(segment.token_start, segment.token_stop), row, strict=True):
                if (layer, token) in known.cells:
                    violated("I3", f"{self.life.address}: token {token} of lease {segment.lease} is scattered twice")
                known.cells.add((layer, token))
                self._device.cache.layers[layer][blocks[token // size]][token % size] = value
        outcome = self.leases.finish_scatter(segment, self._clock.now_s)
        if outcome.filled is not None:
            self._check_filled(known)
            self._on_filled(outcome.filled)
        if outcome.closed is not None:
            self._closed(outcome.closed)

    def _check_scatter(self, tag: Tag, segment: Segment) -> None:
        address, known = self.life.address, self._known.get(segment.lease)
        if known is None or segment.incarnation != self.life.incarnation or tag.lease != segment.lease:
            violated("I3", f"{address}: a segment of lease {segment.lease} is scattered, but the lease is not live")
        grant = known.grant
        if not grant.token_start <= segment.token_start < segment.token_stop <= grant.token_stop:
            violated("I3", f"{address}: a segment writes tokens that lease {segment.lease} was not opened for")
        if self._device.cache.held(grant.block_ids) != known.generations:
            violated("I3", f"{address}: a segment is scattered into blocks that lease {segment.lease} no longer has")

    def _check_filled(self, known: _Written) -> None:
        wanted = NUM_LAYERS * (known.grant.token_stop - known.grant.token_start)
        if len(known.cells) != wanted:
            what = f"lease {known.grant.number} counts as filled with {len(known.cells)} of {wanted} cells"
            violated("I3", f"{self.life.address}: {what}")

    def _closed(self, totals: LeaseTotals) -> None:
        del self._known[totals.number]
        on_closed = self._closing.pop(totals.number)
        self.life.after(0.001 * self._random.random(), partial(on_closed, totals))

    def _refuse(self, tag: Tag, refusal: SegmentRefusal) -> None:
        if refusal is not SegmentRefusal.LATE:
            error = DataLoss(f"segment {tag.number} of lease {tag.lease} was refused: {refusal}")
            self._on_refused(tag.lease, error)
