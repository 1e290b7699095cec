"""Measures a link's latency: one-byte messages are sent back and forth until the shortest round trip is known.

The time includes both threads' polling and wake-ups, as in a transfer. It does not include a separate path of large
payloads, such as a GPU's. Used by the transfer thread only.
"""

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from baton.core.errors import DataLoss
from kvtransfer.segments import PING, PONG, Tag
from kvtransfer.transports.transport import Arrival, Transport

_ROUND_TRIPS = 24
# The content is never read: only its arrival counts.
_MESSAGE_BYTES = 1


@dataclass(eq=False)
class _Measurement:
    """Round trips with one peer, one after another."""

    future: "Future[float]"
    number: int = 0
    sent_s: float = 0.0
    shortest_s: float = float("inf")


class RoundTrips:
    """Answers the pings of every peer, and measures a peer on request."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._byte = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        self._measuring: dict[int, _Measurement] = {}

    @property
    def in_flight(self) -> int:
        return len(self._measuring)

    def measure(self, peer: int, now_s: float, future: "Future[float]") -> None:
        """The future's result is the one-way latency in seconds: half of the shortest round trip."""
        self._measuring[peer] = _Measurement(future)
        self._ping(peer, self._measuring[peer], now_s)

    def arrived(self, tag: Tag, arrival: Arrival, now_s: float) -> None:
        """Takes a ping or pong of a connected peer."""
        self._transport.discard(arrival)
        if tag.number == PING:
            self._transport.send(arrival.peer, Tag(0, tag.lease, PONG).pack(), self._byte)
            return
        measurement = self._measuring.get(arrival.peer)
        if measurement is None or tag.lease != measurement.number:
            return  # an answer to an older ping, or to none
        measurement.shortest_s = min(measurement.shortest_s, now_s - measurement.sent_s)
        if measurement.number < _ROUND_TRIPS:
            self._ping(arrival.peer, measurement, now_s)
        else:
            del self._measuring[arrival.peer]
            measurement.future.set_result(measurement.shortest_s / 2)

    def lost(self, peer: int) -> None:
        measurement = self._measuring.pop(peer, None)
        if measurement is not None:
            measurement.future.set_exception(DataLoss("the peer was lost during its warm-up"))

    def _ping(self, peer: int, measurement: _Measurement, now_s: float) -> None:
        measurement.number += 1
        measurement.sent_s = now_s
        # The transport keeps the request. A failed one shows as a missing answer.
        self._transport.send(peer, Tag(0, measurement.number, PING).pack(), self._byte)
