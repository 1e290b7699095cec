"""A receiver with a rate limit and its senders, driven by hand in one thread, with a clock that the tests set."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.ledger import Ledger, Peer
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.receiver import Receiver
from kvtransfer.records import PeerTraffic, RefusedSegment, SendJob
from kvtransfer.segments import TRAILER_BYTES, Segment
from kvtransfer.sender import Sender
from kvtransfer.settings import TransferSettings
from kvtransfer.staging import Pools
from kvtransfer.transports.loopback import LoopbackTransport

SPEC = KVCacheSpec(KVKind.GQA, num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32")
SEGMENT_TOKENS, SEGMENTS, SLOTS = 4, 16, 3
SEGMENT_BYTES = SEGMENT_TOKENS * SPEC.bytes_per_token
TOKENS = SEGMENTS * SEGMENT_TOKENS
SHAPE = KVCacheShape(KVCacheLayout.NHD, block_size=4, num_blocks=2 * SEGMENTS)
PEERS = (7, 8)
# One message a second.
LIMIT = float(SEGMENT_BYTES + TRAILER_BYTES)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Node:
    """The parts of a transfer thread, without the thread."""

    def __init__(self, clock: Clock, *, limit: float | None) -> None:
        settings = TransferSettings(
            incarnation=1,
            transport="loopback",
            segment_bytes=SEGMENT_BYTES,
            staging_slots=SLOTS,
            digests=True,
            receive_bytes_per_s=limit,
        )
        cache = PagedKVCache(SPEC, SHAPE)
        self.transport, self.ledger = LoopbackTransport(), Ledger()
        mover = CpuMover(cache, self.transport.progress)
        self.filled: list[LeaseTotals] = []
        self.refused: list[RefusedSegment] = []

        def pools() -> Pools:
            pool = mover.open_pool(slot_bytes=settings.message_bytes, slots=SLOTS, through_host=False)
            return Pools(direct=lambda: pool, in_host=lambda: pool)

        parts = cache, mover, self.transport, self.ledger
        self.sender = Sender(*parts, pools(), settings)
        self.receiver = Receiver(
            *parts,
            pools(),
            settings,
            on_filled=self.filled.append,
            on_refused=self.refused.append,
            on_entry=self.transport.discard,
            catch_up=lambda: None,
            clock=clock,
        )

    def step(self) -> bool:
        results = self.transport.progress(), self.receiver.step(), self.sender.step()
        return any(results)


@dataclass
class World:
    clock: Clock
    receiver: Node
    senders: list[Node]

    def run(self) -> None:
        """Steps all nodes until only the passage of time can change anything."""
        moved = True
        while moved:
            moved = False
            for node in (self.receiver, *self.senders):
                moved = node.step() or moved

    def received(self, peer: int) -> int:
        return self.receiver.ledger.traffic[peer].segments_total


@pytest.fixture
def world() -> Iterator[World]:
    clock = Clock()
    made = World(clock, Node(clock, limit=LIMIT), [Node(clock, limit=None) for _ in PEERS])
    for number, sender in zip(PEERS, made.senders, strict=True):
        address = sender.transport.listen(1)
        sender.transport.connect(1, made.receiver.transport.listen(number))
        made.receiver.transport.connect(number, address)
        for node, peer in ((sender, 1), (made.receiver, number)):
            node.ledger.peers[peer] = Peer(peer, SEGMENT_BYTES, "loopback")
            node.ledger.traffic[peer] = PeerTraffic()
    yield made
    for node in (made.receiver, *made.senders):
        node.transport.close()


def send_all(world: World) -> None:
    for lease, (number, sender) in enumerate(zip(PEERS, world.senders, strict=True)):
        blocks = tuple(range(lease * SEGMENTS, (lease + 1) * SEGMENTS))
        world.receiver.receiver.open(LeaseGrant(lease, blocks, 0, TOKENS))
        future: Future[tuple[Segment, ...]] = Future()
        sender.sender.send(SendJob(1, number, lease, 1, 0, 0, TOKENS, TOKENS, blocks), future)


def test_one_message_of_any_sender_is_taken_for_each_that_was_paid_back(world: World) -> None:
    send_all(world)
    for taken in range(1, 2 * SEGMENTS + 1):
        world.run()
        assert sum(map(world.received, PEERS)) == taken
        world.clock.now_s += 1.0
    assert [totals.segments for totals in world.receiver.filled] == [SEGMENTS] * 2
    assert world.receiver.refused == []


def test_both_senders_have_a_share_at_every_time(world: World) -> None:
    """Messages wait in order of arrival, and a sender has no more of them waiting than it has slots."""
    send_all(world)
    for _ in range(2 * SEGMENTS):
        world.run()
        one, other = map(world.received, PEERS)
        assert abs(one - other) <= SLOTS
        world.clock.now_s += 1.0


def test_a_receiver_that_waits_for_its_limit_returns_the_wait_and_has_nothing_in_flight(world: World) -> None:
    """So its thread sleeps that long instead of polling."""
    assert world.receiver.receiver.limited_s is None
    send_all(world)
    world.run()
    assert world.receiver.receiver.in_flight == 0
    assert world.receiver.receiver.limited_s == pytest.approx(1.0, abs=0.03)
    world.clock.now_s += 0.75
    assert world.receiver.receiver.limited_s == pytest.approx(0.25, abs=0.03)
    world.clock.now_s += 0.25
    assert world.receiver.receiver.limited_s is None
