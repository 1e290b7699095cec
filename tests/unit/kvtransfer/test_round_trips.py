"""Round trips between two ends of one process, with a clock that the tests set."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
import torch

from baton.core.errors import DataLoss
from kvtransfer.round_trips import RoundTrips
from kvtransfer.segments import PING, PONG, Tag
from kvtransfer.transports.loopback import LoopbackTransport

PEER = 4


@dataclass
class End:
    """One end of the link, with its transport."""

    transport: LoopbackTransport = field(default_factory=LoopbackTransport)

    def __post_init__(self) -> None:
        self.trips = RoundTrips(self.transport)

    def take_all(self, now_s: float) -> int:
        """Takes the arrived messages; returns their number."""
        self.transport.progress()
        taken = 0
        while arrival := self.transport.probe():
            self.trips.arrived(Tag.unpack(arrival.tag), arrival, now_s)
            taken += 1
        return taken


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    one, other = End(), End()
    address = one.transport.listen(PEER)
    one.transport.connect(PEER, other.transport.listen(PEER))
    other.transport.connect(PEER, address)
    yield one, other
    for end in (one, other):
        end.transport.close()


def test_half_of_the_shortest_round_trip_is_the_latency(ends: tuple[End, End]) -> None:
    one, other = ends
    future: Future[float] = Future()
    now_s, trips = 100.0, 0
    one.trips.measure(PEER, now_s, future)
    while not future.done():
        assert one.trips.in_flight == 1
        assert other.take_all(now_s) == 1
        trips += 1
        now_s += 0.25 if trips == 3 else 1.0
        assert one.take_all(now_s) == 1
    assert future.result() == 0.125
    assert trips > 10
    assert one.trips.in_flight == 0
    assert other.take_all(now_s) == 0


def test_an_unrequested_answer_changes_nothing(ends: tuple[End, End]) -> None:
    one, other = ends
    future: Future[float] = Future()
    one.trips.measure(PEER, 0.0, future)
    byte = torch.zeros(1, dtype=torch.uint8)
    for number in (0, 2, 999):
        other.transport.send(PEER, Tag(0, number, PONG).pack(), byte)
    assert one.take_all(1.0) == 3
    assert not future.done()
    assert other.take_all(1.0) == 1, "one ping, and not another for each wrong answer"


def test_every_ping_is_answered_with_its_number(ends: tuple[End, End]) -> None:
    one, other = ends
    one.transport.send(PEER, Tag(0, 17, PING).pack(), torch.zeros(1, dtype=torch.uint8))
    assert other.take_all(0.0) == 1
    arrival = one.transport.probe()
    assert arrival is not None
    assert Tag.unpack(arrival.tag) == Tag(0, 17, PONG)
    one.transport.discard(arrival)


def test_a_peer_that_is_lost_answers_no_more(ends: tuple[End, End]) -> None:
    one, _ = ends
    future: Future[float] = Future()
    one.trips.measure(PEER, 0.0, future)
    one.trips.lost(PEER)
    assert one.trips.in_flight == 0
    with pytest.raises(DataLoss, match="warm-up"):
        future.result(timeout=0)
