"""The receiving half of the transfer thread: probe, look up the lease, receive, read, check, scatter, count.

A message is given memory only after its tag has been looked up, and its bytes reach the cache only after its trailer
and digest have been checked. The thread calls `step` repeatedly.
"""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from baton.core.errors import UnknownLease
from baton.kvcache.cache import PagedKVCache
from kvtransfer.leases import LeaseGrant, LeaseTable, LeaseTotals
from kvtransfer.ledger import Ledger, Peer, is_pull_link
from kvtransfer.movers.mover import Blocks, CacheReading, Mover, Pending
from kvtransfer.pacing import RateLimit
from kvtransfer.parts import part_with
from kvtransfer.rank_transfer import OnFilled, OnRefused
from kvtransfer.records import RefusedSegment
from kvtransfer.refusals import SegmentRefusal, refusal_error
from kvtransfer.round_trips import RoundTrips
from kvtransfer.segments import PING, PONG, TRAILER_BYTES, WARM_UP, Segment, Tag, decode_sealed, decode_trailer
from kvtransfer.settings import TransferSettings
from kvtransfer.staging import Pools, Slot, StagingPool
from kvtransfer.transports.transport import Arrival, TransferRequest, Transport
from kvtransfer.warm_up import WarmUpReceiver, maps_slot


@dataclass(eq=False)
class _Reception:
    """One message, while it holds a slot:

    request ──► reading ──► scatter ──► over           each begins when the one before is done; refused messages and
       └───────────┴──────────────────► over           warm-up messages are not scattered
    """

    tag: Tag
    peer: Peer
    pool: StagingPool
    slot: Slot
    num_bytes: int
    request: TransferRequest
    reading: CacheReading | None = None
    segment: Segment | None = None
    scatter: Pending | None = None


class Receiver:
    """Fills leases with the segments that arrive.

    Messages that measure links are exempt from `settings.receive_bytes_per_s`.

    Args:
        on_filled, on_refused: called on the transfer thread.
        on_entry: called with the messages of links for pulls; receives or discards each.
        catch_up: runs the calls posted so far. Since the thread last ran them, a lease may have been granted and its
            first segment may have arrived.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        mover: Mover,
        transport: Transport,
        ledger: Ledger,
        pools: Pools,
        settings: TransferSettings,
        *,
        on_filled: OnFilled,
        on_refused: OnRefused,
        on_entry: Callable[[Arrival], None],
        catch_up: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self._mover = mover
        self._parts = settings.parts(cache.spec)
        self._transport = transport
        self._ledger = ledger
        self._pools = pools
        self._slot_bytes = settings.message_bytes
        self._digests = settings.digests
        self._on_filled = on_filled
        self._on_refused = on_refused
        self._on_entry = on_entry
        self._catch_up = catch_up
        self._clock = clock
        self._incarnation = settings.incarnation
        self._leases = LeaseTable(self._parts, incarnation=settings.incarnation)
        self._blocks: dict[int, Blocks] = {}
        self._closing: dict[int, Future[LeaseTotals]] = {}
        self._receptions: list[_Reception] = []
        self._slots_held: Counter[int] = Counter()
        # In order of arrival: messages over the limit, and messages of peers that already hold their share of slots.
        self._parked: deque[tuple[Tag, Arrival]] = deque()
        self._limit = RateLimit(settings.receive_bytes_per_s) if settings.receive_bytes_per_s else None
        self.warm_ups = WarmUpReceiver(digests=settings.digests)
        self.round_trips = RoundTrips(transport)

    @property
    def in_flight(self) -> int:
        return len(self._receptions) + self.round_trips.in_flight

    @property
    def limited_s(self) -> float | None:
        """Seconds for which the limit still delays messages that have arrived; None if it delays none."""
        if self._limit is None or not self._parked:
            return None
        return self._limit.wait_s(self._clock()) or None

    @property
    def open_leases(self) -> int:
        return self._leases.open_leases

    def open(self, grant: LeaseGrant) -> None:
        filled = self._leases.open(grant)
        self._blocks[grant.number] = self._mover.place(grant.block_ids, incoming=True, state_slot=grant.state_slot)
        if filled is not None:
            self._on_filled(filled)

    def close(self, number: int, future: "Future[LeaseTotals]") -> None:
        """Ends a lease. The future gets its totals once none of its scatters runs or ever will."""
        try:
            totals = self._leases.close(number)
        except UnknownLease as error:
            future.set_exception(error)
            return
        self._closing[number] = future
        if totals is not None:
            self._closed(totals)

    def lost(self, peer: int, *, group: int | None = None) -> tuple[int, ...]:
        """Forgets a peer. The caller then has the transport cancel what is in flight.

        Returns:
            The open leases of the peer or its group. They will never be complete.
        """
        self.warm_ups.lost(peer)
        self.round_trips.lost(peer)
        for tag, arrival in self._parked:
            if tag.sender == peer:
                self._transport.discard(arrival)
        self._parked = deque(item for item in self._parked if item[0].sender != peer)
        bound = set(self._leases.bound_to(peer if group is None else group))
        for item in self._receptions:
            if item.tag.sender == peer and item.tag.number != WARM_UP and not item.peer.sealed:
                named = self._leases.filled_by(item.tag, group=group, incarnation=item.peer.incarnation)
                bound.update(() if named is None else (named,))
        return tuple(sorted(bound))

    def holds(self, peer: int) -> bool:
        """Whether anything from that peer is in flight."""
        return self._slots_held[peer] > 0

    def step(self) -> bool:
        """Accepts arrived messages and advances accepted ones. Returns whether anything happened."""
        moved = self._accept_all()
        for item in tuple(self._receptions):
            moved = self._advance(item) or moved
        return moved

    # ---- arrival

    def _accept_all(self) -> bool:
        accepted = self._unpark()
        # A probed message must be received or discarded, so none is probed while no slot may be free.
        while self._pools.may_have_room:
            arrival = self._transport.probe()
            if arrival is None:
                break
            accepted = True
            if is_pull_link(arrival.peer):
                self._on_entry(arrival)
                continue
            tag = Tag.unpack(arrival.tag)
            if tag.number in (PING, PONG) and arrival.peer in self._ledger.peers:
                self.round_trips.arrived(tag, arrival, self._clock())
                continue
            refusal = self._look_up(tag, arrival)
            if refusal in (SegmentRefusal.UNKNOWN_LEASE, SegmentRefusal.UNKNOWN_SENDER):
                self._catch_up()
                refusal = self._look_up(tag, arrival)
            if refusal is not None:
                self._transport.discard(arrival)
                self._refuse(tag, refusal, peer=arrival.peer, authenticated=self._unsealed(arrival.peer))
            elif not self._offer(tag, arrival):
                self._parked.append((tag, arrival))
        return accepted

    def _look_up(self, tag: Tag, arrival: Arrival) -> SegmentRefusal | None:
        if tag.sender != arrival.peer or arrival.peer not in self._ledger.peers:
            return SegmentRefusal.UNKNOWN_SENDER
        if arrival.num_bytes > self._slot_bytes:
            return SegmentRefusal.TOO_LARGE
        if arrival.num_bytes < TRAILER_BYTES:
            return SegmentRefusal.MALFORMED
        if tag.number == WARM_UP:
            return None if self.warm_ups.expects(arrival.peer) else SegmentRefusal.UNEXPECTED
        peer = self._ledger.peers[arrival.peer]
        return self._leases.arrival(tag, self._clock(), group=peer.group, incarnation=peer.incarnation)

    def _offer(self, tag: Tag, arrival: Arrival) -> bool:
        """Begins to receive unless no slot is free, the peer holds its share, or the limit is reached."""
        limit = None if tag.number == WARM_UP else self._limit
        now_s = self._clock()
        if limit is not None and limit.wait_s(now_s) > 0:
            return False
        peer = self._ledger.peers[tag.sender]
        pool = self._pools.of(through_host=peer.through_host)
        if self._slots_held[tag.sender] >= self._ledger.fair_share(pool.slots):
            return False
        slot = pool.take()
        if slot is None:
            return False
        request = self._transport.receive(arrival, slot.message(arrival.num_bytes))
        if limit is not None:
            limit.take(arrival.num_bytes, now_s)
        self._slots_held[tag.sender] += 1
        self._receptions.append(_Reception(tag, peer, pool, slot, arrival.num_bytes, request))
        return True

    def _unpark(self) -> bool:
        before = len(self._parked)
        if before:
            self._parked = deque(item for item in self._parked if not self._offer(*item))
        return len(self._parked) < before

    # ---- from received to over

    def _advance(self, item: _Reception) -> bool:
        """Advances one message as far as possible without waiting. Returns whether it advanced."""
        moved = False
        if item.reading is None:
            if not item.request.done:
                return False
            if not self._was_received(item):
                return self._end(item)
            item.reading = self._read(item)
            moved = True
        if item.scatter is None:
            if not item.reading.done:
                return moved
            item.segment = self._to_scatter(item, item.reading)
            if item.segment is None:
                return self._end(item)
            item.scatter = self._scatter(item.slot, item.segment)
            moved = True
        if not item.scatter.done:
            return moved
        assert item.segment is not None
        self._scattered(item.tag.sender, item.segment)
        return self._end(item)

    def _read(self, item: _Reception) -> CacheReading:
        """Reads a received message: its trailer and, unless it only measures its link, what the checks need."""
        maps = item.tag.number == WARM_UP and maps_slot(item.tag.lease)
        measures = item.tag.number == WARM_UP and not maps
        with_digest = self._digests and not measures
        return self._mover.read(item.slot, item.num_bytes, with_digest=with_digest, with_extremes=maps)

    def _scatter(self, slot: Slot, segment: Segment) -> Pending:
        part = part_with(self._parts, range(segment.layer_start, segment.layer_stop))
        assert part is not None, "the lease table has checked it"
        return self._mover.scatter(slot, self._blocks[segment.lease], segment, part.place(segment))

    def _was_received(self, item: _Reception) -> bool:
        if item.request.failure() is None:
            return True
        # For a peer that is gone, `lost` has reported everything.
        if item.tag.sender in self._ledger.peers:
            self._refuse(item.tag, SegmentRefusal.BROKEN, peer=item.tag.sender)
        return False

    def _to_scatter(self, item: _Reception, reading: CacheReading) -> Segment | None:
        """Checks a message that was read. Returns its segment, with cells claimed, or None if nothing is scattered."""
        tag = item.tag
        if tag.number == WARM_UP:
            if tag.sender in self._ledger.peers:
                self.warm_ups.received(tag.sender, tag.lease, item.num_bytes, reading, self._clock())
            return None
        peer = item.peer
        opened = self._open(tag, reading.trailer, sealed=peer.sealed)
        if isinstance(opened, SegmentRefusal):
            self._refuse(tag, opened, peer=tag.sender, authenticated=not peer.sealed)
            return None
        refusal = self._check(opened, item.num_bytes, reading)
        refusal = refusal or self._leases.start_scatter(tag, opened, group=peer.group, has_draft=peer.has_draft)
        if refusal is not None:
            self._refuse(tag, refusal, peer=tag.sender)
            return None
        return opened

    def _open(self, tag: Tag, trailer: bytes, *, sealed: bool) -> Segment | SegmentRefusal:
        if not sealed:
            return decode_trailer(trailer) or SegmentRefusal.MALFORMED
        key = self._leases.key(tag)
        if key is None:
            return SegmentRefusal.LATE
        return decode_sealed(trailer, key=key, incarnation=self._incarnation) or SegmentRefusal.SEAL

    def _unsealed(self, peer: int) -> bool:
        """Whether messages of that peer count as its own without a seal."""
        return peer in self._ledger.peers and not self._ledger.peers[peer].sealed

    def _check(self, segment: Segment, num_bytes: int, reading: CacheReading) -> SegmentRefusal | None:
        if segment.payload_bytes != num_bytes - TRAILER_BYTES:
            return SegmentRefusal.WRONG_SIZE
        if self._digests and segment.digest != segment.digest_over(reading.digest):
            return SegmentRefusal.DIGEST
        return None

    def _scattered(self, sender: int, segment: Segment) -> None:
        """Counts a segment whose bytes are in its blocks."""
        self._ledger.moved(sender, segment.payload_bytes)
        outcome = self._leases.finish_scatter(segment, self._clock())
        if outcome.filled is not None:
            self._on_filled(outcome.filled)
        if outcome.closed is not None:
            self._closed(outcome.closed)

    def _end(self, item: _Reception) -> bool:
        """Ends a message, whose slot is free then."""
        self._receptions.remove(item)
        self._slots_held[item.tag.sender] -= 1
        item.pool.give_back(item.slot)
        return True

    def _closed(self, totals: LeaseTotals) -> None:
        self._blocks.pop(totals.number).free()
        self._closing.pop(totals.number).set_result(totals)

    def _refuse(self, tag: Tag, refusal: SegmentRefusal, *, peer: int, authenticated: bool = True) -> None:
        """Counts a refused message from that peer. It fails the peer's warm-up, or the lease that this peer fills,
        never another lease.

        Args:
            authenticated: only such messages may fail a lease.
        """
        self._ledger.refusals[refusal] += 1
        if refusal is SegmentRefusal.LATE:
            return
        error = refusal_error(tag, refusal)
        lease = None
        if tag.number == WARM_UP:
            self.warm_ups.failed(peer, error)
        elif authenticated and (sender := self._ledger.peers.get(peer)):
            own = Tag(peer, tag.lease, tag.number)
            lease = self._leases.filled_by(own, group=sender.group, incarnation=sender.incarnation)
        self._on_refused(RefusedSegment(lease, peer, refusal, error))
