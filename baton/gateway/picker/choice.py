"""Which gateway a request goes to. Pure: reports and the time come in, addresses go out.

A gateway's load is what it reported, and what this picker has sent since. Requests of one conversation have a key, by
which each gateway has a rank (rendezvous hashing): the first one gets them, unless it has a quarter more than its share
of the load; then the next one does. So a conversation stays where its texts are known, wherever gateways come and go.
"""

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from baton.core.errors import NoNode, Overloaded

Affinity = Literal["kept", "spilled", "none"]

_SHARE_MOST = 1.25  # of the mean load
_FREE = 8.0  # requests that each gateway may have in any case
# A request that left that long before a report was asked for has reached the gateway.
_ON_ITS_WAY_S = 0.05
_WEIGHT_LEAST, _WEIGHT_MOST = 0.1, 10.0
_FORGETS = 0.02  # the mean size of requests changes with each one by that much
_RETRY_S = 1.0


@dataclass(frozen=True)
class Report:
    """What a gateway has said about itself.

    Attributes:
        asked_s: when it was asked.
        ready: it takes new requests.
        running, waiting: requests.
    """

    asked_s: float
    ready: bool
    running: float
    waiting: float


@dataclass(frozen=True)
class PickRequest:
    """What a request asks for.

    Attributes:
        key: of its conversation; None: any gateway is as good.
        tokens: of its prompt and output, roughly.
        subset: allowed gateways, as host:port or host; None: all.
        sheddable: it is refused where requests wait on all gateways.
    """

    key: bytes | None = None
    tokens: int = 0
    subset: frozenset[str] | None = None
    sheddable: bool = False


@dataclass(frozen=True)
class Picked:
    """host:port of gateways in the order in which they shall be tried."""

    addresses: tuple[str, ...]
    affinity: Affinity


@dataclass(eq=False)
class _Gateway:
    """What the picker knows of one gateway.

    Attributes:
        doubted_s: when a request did not reach it; only a later report makes it ready again.
        sent: time and weight of requests that its report does not count.
    """

    address: str
    report: Report | None = None
    doubted_s: float = float("-inf")
    sent: deque[tuple[float, float]] = field(default_factory=deque)
    sent_weight: float = 0.0

    @property
    def load(self) -> float:
        """In requests of mean size."""
        reported = 0.0 if self.report is None else self.report.running + self.report.waiting
        return reported + self.sent_weight

    def send(self, now_s: float, weight: float) -> None:
        self.sent.append((now_s, weight))
        self.sent_weight += weight

    def hear(self, report: Report) -> None:
        self.report = report
        while self.sent and self.sent[0][0] < report.asked_s - _ON_ITS_WAY_S:
            self.sent.popleft()
        self.sent_weight = sum(weight for _, weight in self.sent)

    def is_ready(self, now_s: float, stale_s: float) -> bool:
        report = self.report
        return report is not None and report.ready and self.doubted_s < report.asked_s >= now_s - stale_s


class GatewayChoice:
    """All gateways that were found.

    Args:
        stale_s: a report that is older counts no more.
        fallbacks: further addresses of each answer.
        shed_waiting: requests that wait on each gateway from which on sheddable ones are refused.
    """

    def __init__(self, *, stale_s: float, fallbacks: int, shed_waiting: int) -> None:
        self._stale_s = stale_s
        self._fallbacks = fallbacks
        self._shed_waiting = shed_waiting
        self._gateways: dict[str, _Gateway] = {}
        self._mean_tokens = 0.0
        self._turn = 0

    def set_addresses(self, addresses: Set[str]) -> None:
        """From now on these, as host:port, are all gateways."""
        self._gateways = {each: self._gateways.get(each) or _Gateway(each) for each in sorted(addresses)}

    def report(self, address: str, report: Report) -> None:
        if (gateway := self._gateways.get(address)) is not None:
            gateway.hear(report)

    def lost(self, address: str) -> None:
        """The gateway cannot be reached."""
        if (gateway := self._gateways.get(address)) is not None:
            gateway.report = None

    def doubt(self, address: str, now_s: float) -> None:
        """A request did not reach the gateway."""
        if (gateway := self._gateways.get(address)) is not None:
            gateway.doubted_s = now_s

    def count(self, now_s: float) -> tuple[int, int]:
        """How many gateways are ready, and how many are not."""
        ready = sum(gateway.is_ready(now_s, self._stale_s) for gateway in self._gateways.values())
        return ready, len(self._gateways) - ready

    def pick(self, wanted: PickRequest, now_s: float) -> Picked:
        """The gateway for a request that goes there now.

        Raises:
            NoNode: none that is allowed is ready.
            Overloaded: requests wait on all of them, and this one is sheddable.
        """
        allowed = list(_allowed(self._gateways.values(), wanted.subset))
        ready = [each for each in allowed if each.is_ready(now_s, self._stale_s)]
        if not ready:
            message = f"none of {len(allowed)} gateways that may serve the request is ready"
            raise NoNode(message, cure="send it again", retry_after_s=_RETRY_S)
        if wanted.sheddable and all(each.report and each.report.waiting >= self._shed_waiting for each in ready):
            message = "requests wait on all gateways, and this one's objective is sheddable"
            raise Overloaded(message, cure="send it again later", retry_after_s=_RETRY_S)
        weight = self._weight(wanted.tokens)
        most = max(_FREE, _SHARE_MOST * (sum(each.load for each in ready) + weight) / len(ready))
        if wanted.key is None:
            self._turn += 1
            turn = self._turn.to_bytes(8, "big")
            order = sorted(ready, key=lambda each: (each.load, _rank(turn, each.address)))
            affinity: Affinity = "none"
        else:
            key = wanted.key
            ranked = sorted(ready, key=lambda each: _rank(key, each.address))
            fits = [each for each in ranked if each.load + weight <= most]
            order = fits + sorted((each for each in ranked if each not in fits), key=lambda each: each.load)
            affinity = "kept" if order[0] is ranked[0] else "spilled"
        order[0].send(now_s, weight)
        return Picked(tuple(each.address for each in order[: 1 + self._fallbacks]), affinity)

    def _weight(self, tokens: int) -> float:
        """The request's size against the mean of all."""
        size = float(max(tokens, 1))
        if not self._mean_tokens:
            self._mean_tokens = size
        weight = min(max(size / self._mean_tokens, _WEIGHT_LEAST), _WEIGHT_MOST)
        self._mean_tokens += _FORGETS * (weight - 1) * self._mean_tokens
        return weight


def _allowed(gateways: Iterable[_Gateway], subset: frozenset[str] | None) -> Iterable[_Gateway]:
    if subset is None:
        return gateways
    return (each for each in gateways if not subset.isdisjoint(_names(each.address)))


def _names(address: str) -> tuple[str, ...]:
    host = address.rpartition(":")[0]
    return address, host, host.strip("[]")


def _rank(key: bytes, address: str) -> bytes:
    return blake2b(address.encode(), key=key[:64], digest_size=8).digest()
