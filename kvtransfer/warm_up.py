"""Warming up a link: messages through every staging slot before traffic, checked and timed at the receiver.

The first message through a buffer maps it, which takes 10-30 times as long as a transfer. Then bursts of small and of
full messages follow; the quickest burst of each size counts, so that a busy machine does not distort the measure.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.core.errors import BatonError, DataLoss, PeerRefused
from kvtransfer.link import LEAST_PAYLOAD_BYTES, message_cost_s
from kvtransfer.movers.mover import CacheReading
from kvtransfer.records import LinkMeasure
from kvtransfer.segments import TRAILER_BYTES, WARM_UP, Segment, decode_trailer

# The second half of a burst is timed, because messages that are in flight together end together. Windows of four
# messages between GPUs showed up to 458 GB/s where a plain copy reaches 396, so bursts are as long as time permits.
_LEAST_PER_SLOT = 2
_MOST_PER_SLOT = 8
_SIZES = 2
_BURSTS = 5
# After this time bursts are short and no further pair of bursts begins. The slowest links get one pair.
_BUDGET_S = 0.2
# A warm-up message's lease field: its burst (0: messages that map the slots) and its number within the burst.
_NUMBER_BITS = 16
# More messages than any sender's slots need.
_MESSAGES_MAX = 1 << 17


def warm_up_segments(slots: int, payload_bytes: int, clock: Callable[[], float]) -> Iterator[Segment]:
    """The messages of a warm-up: one through each slot, then bursts of small and of full messages in turn."""
    for index in range(slots):
        yield _message(0, index, payload_bytes)
    until_s = clock() + _BUDGET_S
    sizes = (min(LEAST_PAYLOAD_BYTES, payload_bytes // 2), payload_bytes)
    for burst in range(1, 2 * _BURSTS + 1):
        for index in range(_MOST_PER_SLOT * slots):
            if index >= _LEAST_PER_SLOT * slots and clock() > until_s:
                break
            yield _message(burst, index, sizes[(burst - 1) % _SIZES])
        if burst % _SIZES == 0 and clock() > until_s:
            return


def maps_slot(lease: int) -> bool:
    """Whether a warm-up message with that lease field maps a slot: its payload is a pattern, which is checked. Timed
    messages carry the slot's current content."""
    return lease >> _NUMBER_BITS == 0


def pattern(index: int) -> int:
    """The value of every byte of a message's payload: never zero, distinct for 255 indices, quick to fill and check."""
    return index % 255 + 1


def _message(burst: int, number: int, payload_bytes: int) -> Segment:
    return Segment(0, burst << _NUMBER_BITS | number, WARM_UP, 0, 0, 0, 0, 0, 0, payload_bytes)


@dataclass(frozen=True)
class _Arrived:
    time_s: float
    burst: int
    payload_bytes: int


@dataclass
class _Progress:
    arrived: list[_Arrived] = field(default_factory=list)
    error: BatonError | None = None
    waiting: "tuple[int, int, str, Future[LinkMeasure]] | None" = None


class WarmUpReceiver:
    """Collects the warm-up messages of all peers until `expect` asks for a peer's measure. Each peer warms up once."""

    def __init__(self, *, digests: bool) -> None:
        self._digests = digests
        self._peers: dict[int, _Progress] = {}
        self._measured: set[int] = set()

    def expects(self, peer: int) -> bool:
        """Whether a further warm-up message of that peer is allowed."""
        progress = self._peers.get(peer)
        return peer not in self._measured and (progress is None or len(progress.arrived) < _MESSAGES_MAX)

    def failed(self, peer: int, error: BatonError) -> None:
        """Fails a warm-up: a message was refused, or did not arrive whole."""
        if peer in self._measured:
            return
        progress = self._peers.setdefault(peer, _Progress())
        progress.error = progress.error or error
        self._finish(peer)

    def received(self, peer: int, lease: int, num_bytes: int, reading: CacheReading, now_s: float) -> None:
        """Counts and checks one message that was received and read.

        Args:
            lease: the lease field of its tag.
            reading: with extremes and, if this node requires digests, with a digest for messages that map a slot.
        """
        progress = self._peers.setdefault(peer, _Progress())
        payload_bytes = num_bytes - TRAILER_BYTES
        progress.error = progress.error or self._check(lease, payload_bytes, reading)
        progress.arrived.append(_Arrived(now_s, lease >> _NUMBER_BITS, payload_bytes))
        self._finish(peer)

    def expect(self, peer: int, messages: int, num_bytes: int, carrier: str, future: "Future[LinkMeasure]") -> None:
        """Completes the future once that many messages have arrived: with the measure, still without latency, or with
        an error."""
        self._peers.setdefault(peer, _Progress()).waiting = (messages, num_bytes, carrier, future)
        self._finish(peer)

    def lost(self, peer: int) -> None:
        progress = self._peers.pop(peer, None)
        self._measured.discard(peer)
        if progress is not None and progress.waiting is not None:
            progress.waiting[3].set_exception(DataLoss("the peer was lost during its warm-up"))

    def _finish(self, peer: int) -> None:
        progress = self._peers[peer]
        if progress.waiting is None:
            return
        if progress.error is None and len(progress.arrived) < progress.waiting[0]:
            return
        messages, num_bytes, carrier, future = progress.waiting
        del self._peers[peer]
        self._measured.add(peer)
        arrived_bytes = sum(message.payload_bytes for message in progress.arrived)
        try:
            if progress.error is not None:
                raise progress.error
            if (len(progress.arrived), arrived_bytes) != (messages, num_bytes):
                raise DataLoss(
                    f"the warm-up delivered {arrived_bytes} bytes in {len(progress.arrived)} messages, "
                    f"the peer sent {num_bytes} in {messages}"
                )
            future.set_result(_measure(progress.arrived, carrier))
        except BatonError as error:
            future.set_exception(error)

    def _check(self, lease: int, payload_bytes: int, reading: CacheReading) -> BatonError | None:
        segment = decode_trailer(reading.trailer)
        if segment is None or (segment.payload_bytes, segment.lease) != (payload_bytes, lease):
            return DataLoss("a warm-up message arrived without its trailer")
        if self._digests and segment.digest == 0:
            return PeerRefused(
                "the peer sends no digests, and this node requires them",
                field="digests",
                value="off",
                allowed=("on",),
                cure="start both nodes with the same release",
            )
        if not maps_slot(lease):
            return None
        value = pattern(lease)
        wrong_digest = self._digests and segment.digest != segment.digest_over(reading.digest)
        if reading.extremes != (value, value) or wrong_digest:
            return DataLoss("a warm-up message arrived damaged", cure="check the link and the GPUs' peer access")
        return None


def _measure(arrived: list[_Arrived], carrier: str) -> LinkMeasure:
    """The measure of the quickest burst of each size. GB/s is the actual rate of full messages, their cost included.

    Raises:
        DataLoss: there are not two sizes.
    """
    quickest_s: dict[int, float] = {}
    for burst in {message.burst for message in arrived if message.burst}:
        messages = [message for message in arrived if message.burst == burst]
        timed = len(messages) // 2
        each_s = (messages[-1].time_s - messages[-1 - timed].time_s) / max(1, timed)
        size = messages[0].payload_bytes
        quickest_s[size] = min(each_s, quickest_s.get(size, each_s))
    if len(quickest_s) != _SIZES:
        raise DataLoss(f"the warm-up timed messages of {len(quickest_s)} sizes instead of {_SIZES}")
    small, large = sorted(quickest_s)
    cost_s = message_cost_s(small_bytes=small, small_s=quickest_s[small], large_bytes=large, large_s=quickest_s[large])
    return LinkMeasure(carrier, large / max(quickest_s[large], 1e-9) / 1e9, message_cost_s=cost_s)
