"""Warming a pair up: messages through every staging slot before traffic, checked and timed at the receiver.

The first message through a buffer maps it, which costs 10-30 times a transfer. Knows nothing of leases and caches.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.errors import BatonError, DataLoss, PeerRefused
from kvtransfer.movers import Reading
from kvtransfer.records import LinkMeasure
from kvtransfer.segments import TRAILER_BYTES, WARM_UP, Segment, decode_trailer

# The first pass maps the buffers, the second is timed.
_PASSES = 2


def warm_up_segments(slots: int, payload_bytes: int) -> Iterator[Segment]:
    """The messages that warm a link up; each one's lease field counts them."""
    for index in range(_PASSES * slots):
        yield Segment(0, index, WARM_UP, 0, 0, 0, 0, 0, 0, payload_bytes)


def pattern(index: int) -> int:
    """Every byte of one warm-up message's payload: never zero, different for each of 255 indices, and quick to make and
    to check, so that the link is what is timed."""
    return index % 255 + 1


@dataclass
class _Progress:
    arrived: list[tuple[float, int]] = field(default_factory=list)  # time, payload bytes
    error: BatonError | None = None
    waiting: "tuple[int, int, str, Future[LinkMeasure]] | None" = None


class WarmUpReceiver:
    """The warm-up messages of all peers that have not been asked for yet."""

    def __init__(self, *, digests: bool) -> None:
        self._digests = digests
        self._peers: dict[int, _Progress] = {}

    def received(self, peer: int, num_bytes: int, reading: Reading, now_s: float) -> None:
        """One message of that size is in and was read, with the digest that this node wants, and with extremes."""
        progress = self._peers.setdefault(peer, _Progress())
        payload_bytes = num_bytes - TRAILER_BYTES
        progress.error = progress.error or self._check(payload_bytes, reading)
        progress.arrived.append((now_s, payload_bytes))
        self._tell(peer)

    def expect(self, peer: int, messages: int, num_bytes: int, carrier: str, future: "Future[LinkMeasure]") -> None:
        """Completes the future once that many messages have come: with the measure, or with what was wrong."""
        self._peers.setdefault(peer, _Progress()).waiting = (messages, num_bytes, carrier, future)
        self._tell(peer)

    def lost(self, peer: int) -> None:
        progress = self._peers.pop(peer, None)
        if progress is not None and progress.waiting is not None:
            progress.waiting[3].set_exception(DataLoss("the peer was lost during its warm-up"))

    def _tell(self, peer: int) -> None:
        progress = self._peers[peer]
        if progress.waiting is None or len(progress.arrived) < progress.waiting[0]:
            return
        messages, num_bytes, carrier, future = progress.waiting
        del self._peers[peer]
        arrived_bytes = sum(size for _, size in progress.arrived)
        if progress.error is None and (len(progress.arrived), arrived_bytes) != (messages, num_bytes):
            progress.error = DataLoss(
                f"the warm-up brought {arrived_bytes} bytes in {len(progress.arrived)} messages, "
                f"and not {num_bytes} in {messages}"
            )
        if progress.error is not None:
            future.set_exception(progress.error)
        else:
            future.set_result(LinkMeasure(carrier, _gigabytes_per_s(progress.arrived)))

    def _check(self, payload_bytes: int, reading: Reading) -> BatonError | None:
        segment = decode_trailer(reading.trailer)
        if segment is None or segment.payload_bytes != payload_bytes:
            return DataLoss("a warm-up message came without its trailer")
        if self._digests and segment.digest == 0:
            return PeerRefused(
                "the peer sends no digests, and this node wants them",
                field="digests",
                value="off",
                allowed=("on",),
                cure="start both nodes with the same --digests",
            )
        value = pattern(segment.lease)
        wrong_digest = self._digests and segment.sealed(reading.digest) != segment
        if reading.extremes != (value, value) or wrong_digest:
            return DataLoss("a warm-up message came damaged", cure="check the link and the GPUs' peer access")
        return None


def _gigabytes_per_s(arrived: list[tuple[float, int]]) -> float:
    if len(arrived) < _PASSES:
        return 0.0
    half = len(arrived) // 2
    seconds = arrived[-1][0] - arrived[half - 1][0]
    return sum(size for _, size in arrived[half:]) / max(seconds, 1e-9) / 1e9
