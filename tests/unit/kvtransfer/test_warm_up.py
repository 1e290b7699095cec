"""A warm-up's messages, checks and measurements, with messages and times from the tests."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest

from baton.core.errors import DataLoss, PeerRefused
from kvtransfer.movers.mover import DoneReading
from kvtransfer.records import LinkMeasure
from kvtransfer.segments import TRAILER_BYTES, Segment
from kvtransfer.warm_up import WarmUpReceiver, maps_slot, pattern, warm_up_segments

SLOTS = 3
LARGE, SMALL = 1 << 20, 64 << 10
PEER = 5
COST_S, BYTES_PER_S = 1e-4, 2e9
PAYLOAD_DIGEST = 77


def all_segments() -> list[Segment]:
    return list(warm_up_segments(SLOTS, LARGE, lambda: 0.0))


@dataclass
class Arrivals:
    """A receiver, and messages that arrive in order as over a link of known speed."""

    receiver: WarmUpReceiver
    now_s: float = 0.0
    messages: int = 0
    num_bytes: int = 0

    def come(self, segments: "list[Segment] | Iterator[Segment]", *, slowed: frozenset[int] = frozenset()) -> None:
        """Receives the segments, each at its time.

        Args:
            slowed: bursts during which other work uses the machine.
        """
        for segment in segments:
            took_s = COST_S + segment.payload_bytes / BYTES_PER_S
            self.now_s += took_s * (50 if segment.lease >> 16 in slowed else 1)
            self.come_as(segment, segment)

    def come_as(self, tagged: Segment, segment: Segment, *, extremes: tuple[int, int] | None = None) -> None:
        digest = PAYLOAD_DIGEST if maps_slot(segment.lease) else 0
        value = pattern(segment.lease) if maps_slot(segment.lease) else 0
        reading = DoneReading(segment.encode(segment.digest_over(digest)), digest, extremes or (value, value))
        self.receiver.received(PEER, tagged.lease, segment.payload_bytes + TRAILER_BYTES, reading, self.now_s)
        self.messages += 1
        self.num_bytes += segment.payload_bytes

    def result(self) -> LinkMeasure:
        future: Future[LinkMeasure] = Future()
        self.receiver.expect(PEER, self.messages, self.num_bytes, "cma", future)
        return future.result(timeout=0)


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals(WarmUpReceiver(digests=True))


def test_every_slot_is_mapped_first_by_a_full_message_with_a_pattern_of_its_own() -> None:
    first = all_segments()[:SLOTS]
    assert [segment.payload_bytes for segment in first] == [LARGE] * SLOTS
    assert all(maps_slot(segment.lease) for segment in first)
    assert len({pattern(segment.lease) for segment in first}) == SLOTS
    assert not any(maps_slot(segment.lease) for segment in all_segments()[SLOTS:])


def test_no_two_messages_have_one_number() -> None:
    assert len({segment.lease for segment in all_segments()}) == len(all_segments())


def test_over_a_slow_link_one_pair_of_bursts_must_do() -> None:
    clock = iter(range(1000))
    slow = list(warm_up_segments(SLOTS, LARGE, lambda: float(next(clock))))
    assert {segment.payload_bytes for segment in slow[SLOTS:]} == {SMALL, LARGE}
    assert len({segment.lease >> 16 for segment in slow}) == 3


def test_cost_and_rate_are_found(arrivals: Arrivals) -> None:
    arrivals.come(all_segments())
    measure = arrivals.result()
    assert measure.transport == "cma"
    assert measure.message_cost_s == pytest.approx(COST_S)
    assert measure.gigabytes_per_s == pytest.approx(LARGE / (COST_S + LARGE / BYTES_PER_S) / 1e9)


def test_a_machine_that_is_busy_for_a_while_does_not_change_the_result(arrivals: Arrivals) -> None:
    arrivals.come(all_segments(), slowed=frozenset({0, 1, 2, 4, 5}))
    assert arrivals.result().message_cost_s == pytest.approx(COST_S)


def test_messages_of_one_size_are_no_measurement(arrivals: Arrivals) -> None:
    arrivals.come([segment for segment in all_segments() if segment.payload_bytes == LARGE])
    with pytest.raises(DataLoss, match="sizes"):
        arrivals.result()


def test_a_missing_message_is_reported(arrivals: Arrivals) -> None:
    arrivals.come(all_segments())
    arrivals.num_bytes -= 1
    with pytest.raises(DataLoss, match="bytes in"):
        arrivals.result()


def test_a_payload_that_is_not_the_pattern_is_damage(arrivals: Arrivals) -> None:
    first, *others = all_segments()
    arrivals.come_as(first, first, extremes=(0, pattern(first.lease)))
    arrivals.come(others)
    with pytest.raises(DataLoss, match="damaged"):
        arrivals.result()


@pytest.mark.parametrize("index", [0, SLOTS])
def test_a_message_of_another_number_than_its_tag_is_refused(arrivals: Arrivals, index: int) -> None:
    segments = all_segments()
    arrivals.come_as(segments[index], replace(segments[index], lease=segments[-1].lease))
    arrivals.come(segments[1:])
    with pytest.raises(DataLoss, match="trailer"):
        arrivals.result()


def test_no_digest_where_one_is_wanted_is_refused(arrivals: Arrivals) -> None:
    segment = all_segments()[0]
    reading = DoneReading(segment.encode(segment.digest), 0, (1, 1))
    arrivals.receiver.received(PEER, segment.lease, LARGE + TRAILER_BYTES, reading, 0.0)
    arrivals.messages, arrivals.num_bytes = 1, LARGE
    with pytest.raises(PeerRefused, match="digests"):
        arrivals.result()
