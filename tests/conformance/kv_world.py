"""One receiver in a world in which everything happens only when it is told to: messages arrive, requests and copies
end, leases are closed, peers vanish, the receiver looks. The receiver, its lease table and its staging are the real
ones; what may be observed of them is checked with every event.
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from attention.cache import PagedKVCache
from attention.layout import KVCacheLayout
from attention.spec import KVCacheShape
from kvtransfer.leases import LeaseGrant, LeaseTotals, Refusal
from kvtransfer.receiver import Receiver, _Reception
from kvtransfer.records import Ledger, Peer, SegmentRefused
from kvtransfer.segments import Tag
from kvtransfer.staging import Pools, StagingPool
from tests.conformance.kv_simulated import (
    INCARNATION,
    JUNK,
    SLOT_BYTES,
    SPEC,
    Closing,
    Copies,
    Message,
    Network,
    Staging,
    make_message,
    one_pool,
    written_by,
)

# A kind, and the number of what it happens to.
Event = tuple[str, int]
LOOK: Event = ("look", 0)
# Nothing but their owners brings these about.
_CALLS = ("close", "lose")


def _nothing() -> None:
    """When the receiver wants to catch up with calls, none waits: they are events."""


class World:
    """Leases of as many segments each, of one token; lease i is filled by peer `senders[i]`.

    Events: ("arrive", lease) for its next message, ("again", message) for one sent twice, ("look", 0), ("end",
    message) of a receive, ("copy", message) of a reading or scatter, ("close", lease), ("lose", peer). What a cancel
    and a timeout are to a receiver is a close; the owner of the lease does it, whatever has come and whatever has not.

    Args:
        repeats: how many messages may be sent twice.
    """

    def __init__(self, senders: tuple[int, ...], *, segments: int, slots: int, repeats: int) -> None:
        self.senders = senders
        self.segments = segments
        self.grants = [
            LeaseGrant(lease, tuple(range(lease * segments, (lease + 1) * segments)), 0, segments)
            for lease in range(len(senders))
        ]
        self.messages = [
            make_message(1 + lease * segments + token, peer, lease, token)
            for lease, peer in enumerate(senders)
            for token in range(segments)
        ]
        self.peers = {number: Peer(number, SPEC.bytes_per_token, "simulated") for number in sorted(set(senders))}
        self.pool = one_pool(slots)
        self.staging = Staging(self.pool)
        self.network = Network(
            self.staging,
            {message.number: message.arrival for message in self.messages},
            {peer: deque() for peer in self.peers},
        )
        trailers = {JUNK: b"", **{message.number: message.trailer for message in self.messages}}
        self.copies = Copies(self.staging, trailers, [JUNK] * len(self.messages))
        self.ledger = Ledger(peers=dict(self.peers))
        self.sent = [0] * len(senders)
        self.repeats = repeats
        self.filled = [False] * len(senders)
        self.closing: dict[int, Closing] = {}
        self.told: list[SegmentRefused] = []
        self.receiver = self._make_receiver()
        for grant in self.grants:
            self.receiver.open(grant)
        self.block_ids = dict(self.receiver._block_ids)

    def _make_receiver(self) -> Receiver:
        # Of mover and transport, they do what a receiver asks for.
        mover: Any = self.copies
        transport: Any = self.network
        pools = Pools(direct=self._the_pool, in_host=self._the_pool)
        pools.of(through_host=False)
        return Receiver(
            PagedKVCache(SPEC, KVCacheShape(KVCacheLayout.NHD, 1, len(self.messages))),
            mover,
            transport,
            self.ledger,
            pools,
            slot_bytes=SLOT_BYTES,
            incarnation=INCARNATION,
            digests=False,
            on_filled=self._on_filled,
            on_refused=self.told.append,
            catch_up=_nothing,
        )

    def _the_pool(self) -> StagingPool:
        return self.pool

    def _on_filled(self, totals: LeaseTotals) -> None:
        lease = totals.number
        assert not self.filled[lease], "told once"
        assert lease not in self.closing, "nobody waits for it any more"
        assert all(self._has_come(message) for message in self._of(lease)), "I2: it is filled"
        self.filled[lease] = True

    def _of(self, lease: int) -> list[Message]:
        return self.messages[lease * self.segments : (lease + 1) * self.segments]

    def _has_come(self, message: Message) -> bool:
        return self.copies.blocks[message.number - 1] == message.number

    # ---- events

    def possible(self) -> list[Event]:
        """Events that can happen now."""
        return list(self._possible())

    def _possible(self) -> Iterator[Event]:
        yield LOOK
        for lease, peer in enumerate(self.senders):
            if peer in self.ledger.peers:
                if self.sent[lease] < self.segments:
                    yield "arrive", lease
                if self.repeats:
                    for message in self._of(lease)[: self.sent[lease]]:
                        yield "again", message.number
            if lease not in self.closing:
                yield "close", lease
        for peer in self.ledger.peers:
            yield "lose", peer
        for request in self.network.requests:
            yield "end", request.message
        for copy in self.copies.waiting:
            yield "copy", copy.message

    def happen(self, event: Event) -> bool:
        """Whether it was a look that found nothing to do."""
        kind, number = event
        match kind:
            case "look":
                return self._look()
            case "arrive":
                message = self._of(number)[self.sent[number]]
                self.network.queues[message.peer].append(message.number)
                self.sent[number] += 1
            case "again":
                self.network.queues[self.messages[number - 1].peer].append(number)
                self.repeats -= 1
            case "end":
                self.network.end(next(request for request in self.network.requests if request.message == number))
            case "copy":
                self._copy(number)
            case "close":
                future: Any = Closing()
                self.closing[number] = future
                self.receiver.close(number, future)
            case "lose":
                self._lose(number)
        self._check_slots()
        return False

    def _copy(self, number: int) -> None:
        copy = next(copy for copy in self.copies.waiting if copy.message == number)
        for block in written_by(copy):
            lease = block // self.segments
            assert not self.is_closed(lease), "I3: written to after its lease was over"
            assert self.copies.blocks[block] == JUNK, "I3: written to twice"
        self.copies.end(copy)
        for block in written_by(copy):
            assert self._has_come(self.messages[block]), "I3: another segment's or another lease's tokens"

    def _lose(self, peer: int) -> None:
        """What the transfer thread does when it disconnects a peer."""
        self.ledger.peers.pop(peer)
        bound = self.receiver.lost(peer)
        assert all(self.senders[lease] == peer and lease not in self.closing for lease in bound), "its open leases"
        self.network.disconnect(peer)
        assert all(tag.sender != peer for tag, _ in self.receiver._parked), "I6: nothing of it waits"
        self.network.discarded.clear()

    def _look(self) -> bool:
        receiver = self.receiver
        before = tuple(receiver._receptions)
        self.ledger.refusals.clear()
        self.told.clear()
        idle = not receiver.step()
        self._check_slots()
        self._check_refusals([item for item in before if item not in receiver._receptions])
        if idle:
            self._check_idle()
        return idle

    # ---- what must hold

    def _check_slots(self) -> None:
        """A slot is free, or taken by one message that is being looked after, of which at most one operation runs."""
        pool, receptions = self.pool, self.receiver._receptions
        taken = {item.slot.index for item in receptions}
        assert len(taken) == len(receptions), "a slot is taken by one message at a time"
        assert pool._taken == taken, "no slot is lost, and none given back while it is used"
        assert len(pool._free) + len(taken) == pool.slots
        busy = self._busy_slots()
        assert len(set(busy)) == len(busy), "a slot is used by one operation at a time"
        assert taken.issuperset(busy), "a slot is not given back while it is used"

    def _check_refusals(self, over: list[_Reception]) -> None:
        """What is over after a look was scattered, was cancelled with its link, or was refused for a reason; every
        refusal is counted once."""
        expected: Counter[Refusal] = Counter()
        for item in over:
            if item.request.failure() is not None:
                assert item.tag.sender not in self.ledger.peers
            elif item.scatter is None:
                assert item.tag.lease in self.closing, "refused for no reason"
                expected[Refusal.LATE] += 1
        for number in self.network.discarded:
            late = self.messages[number - 1].tag.lease in self.closing
            assert late or self._is_known(number), "refused for no reason"
            expected[Refusal.LATE if late else Refusal.DUPLICATE] += 1
        self.network.discarded.clear()
        assert self.ledger.refusals == expected
        assert Counter(refused.refusal for refused in self.told) == expected - Counter(
            {Refusal.LATE: expected[Refusal.LATE]}
        )

    def _check_idle(self) -> None:
        """The receiver waits for nothing but what is under way, so all that waits ends when that ends."""
        receiver = self.receiver
        assert self.pool._taken == set(self._busy_slots()), "no slot is kept"
        assert receiver.in_flight == len(self.pool._taken)
        held = Counter(item.tag.sender for item in receiver._receptions)
        for peer in self.peers:
            assert receiver.holds(peer) == (held[peer] > 0), "I6"
            assert peer in self.ledger.peers or not self.network.queues[peer]
        share = self.ledger.fair_share(self.pool.slots)
        for tag, _ in receiver._parked:
            assert tag.sender in self.ledger.peers, "I6"
            assert not self.pool.available or held[tag.sender] >= share, "it waits although there is room"
        assert not self.pool.available or not any(self.network.queues.values()), "it waits although there is room"
        for lease in range(len(self.senders)):
            self._check_lease(lease)

    def _check_lease(self, lease: int) -> None:
        receiver = self.receiver
        if lease in self.closing:
            scattered = {block // self.segments for copy in self.copies.waiting for block in written_by(copy)}
            assert self.is_closed(lease) == (lease not in scattered), "a lease's end waits for its scatters"
        kept = not self.is_closed(lease)
        assert (lease in receiver._leases._leases) == (lease in receiver._block_ids) == kept
        assert (lease in receiver._closing) == (kept and lease in self.closing)
        if lease in self.closing or self.senders[lease] not in self.ledger.peers:
            return
        for message in self._of(lease)[: self.sent[lease]]:
            assert self._is_known(message.number), "a segment is lost"
        assert self.filled[lease] == all(self._has_come(message) for message in self._of(lease))

    def _is_known(self, number: int) -> bool:
        """Whether a message is under way, or has come."""
        return (
            self._has_come(self.messages[number - 1])
            or any(self.number_of(item.tag) == number for item in self.receiver._receptions)
            or any(arrival.handle == number for _, arrival in self.receiver._parked)
            or any(number in queue for queue in self.network.queues.values())
        )

    def _busy_slots(self) -> list[int]:
        return [request.slot for request in self.network.requests] + [copy.slot for copy in self.copies.waiting]

    def number_of(self, tag: Tag) -> int:
        return 1 + tag.lease * self.segments + tag.number

    def is_closed(self, lease: int) -> bool:
        closing = self.closing.get(lease)
        return closing is not None and closing.totals is not None

    def is_over(self) -> bool:
        """Nothing is under way and nothing more can come."""
        return not self._busy_slots() and all(kind in (*_CALLS, "look", "again") for kind, _ in self._possible())
