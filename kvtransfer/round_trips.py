"""Round trips over a link: a message of one byte there, another one back, as often as it takes to see the shortest.

Both ends take part as they do in a transfer, their threads' looks and wake-ups included; the payload's own path beside
the line for small messages, such as a GPU's, has none. Needs no staging. Knows nothing of leases and of what links
carry else. Used by the transfer thread alone.
"""

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from baton.errors import DataLoss
from kvtransfer.segments import PING, PONG, Tag
from kvtransfer.transports.transport import Arrival, Transport

_ROUND_TRIPS = 24
# Nobody reads it: that it came is the message.
_MESSAGE_BYTES = 1


@dataclass(eq=False)
class _Asked:
    """Round trips with one peer, one after the other."""

    future: "Future[float]"
    number: int = 0
    sent_s: float = 0.0
    shortest_s: float = float("inf")


class RoundTrips:
    """Answers every peer's pings, and asks those that it is told to."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._byte = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        self._asked: dict[int, _Asked] = {}

    @property
    def in_flight(self) -> int:
        return len(self._asked)

    def measure(self, peer: int, now_s: float, future: "Future[float]") -> None:
        """The future gets the seconds of one way: half of the shortest round trip."""
        self._asked[peer] = _Asked(future)
        self._ask(peer, self._asked[peer], now_s)

    def arrived(self, tag: Tag, arrival: Arrival, now_s: float) -> None:
        """Takes a ping or pong of a connected peer."""
        self._transport.discard(arrival)
        if tag.number == PING:
            self._transport.send(arrival.peer, Tag(0, tag.lease, PONG).pack(), self._byte)
            return
        asked = self._asked.get(arrival.peer)
        if asked is None or tag.lease != asked.number:
            return  # nobody waits for it any more
        asked.shortest_s = min(asked.shortest_s, now_s - asked.sent_s)
        if asked.number < _ROUND_TRIPS:
            self._ask(arrival.peer, asked, now_s)
        else:
            del self._asked[arrival.peer]
            asked.future.set_result(asked.shortest_s / 2)

    def lost(self, peer: int) -> None:
        asked = self._asked.pop(peer, None)
        if asked is not None:
            asked.future.set_exception(DataLoss("the peer was lost during its warm-up"))

    def _ask(self, peer: int, asked: _Asked, now_s: float) -> None:
        asked.number += 1
        asked.sent_s = now_s
        # The transport keeps what is under way; that it fails shows in that no answer comes.
        self._transport.send(peer, Tag(0, asked.number, PING).pack(), self._byte)
