"""Chooses the gateway for a request. Pure: reports and times go in, addresses come out.

A gateway's load is what it reported plus what this picker sent since. Requests of one conversation share a key, which
ranks the gateways (rendezvous hashing). The first gateway gets them, unless its load exceeds its share by a quarter;
then the next one does. So a conversation stays at the gateway that cached its texts, even if others come and go.
"""

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from baton.core.errors import NoNode, Overloaded

Affinity = Literal["kept", "spilled", "none"]

_SHARE_MOST = 1.25  # of the mean load
_FREE = 8.0  # requests that each gateway may always have
# A report counts the requests that were sent at least this long before it was requested.
_ON_ITS_WAY_S = 0.05
_WEIGHT_LEAST, _WEIGHT_MOST = 0.1, 10.0
_FORGETS = 0.02  # weight of each request in the moving mean of sizes
_RETRY_S = 1.0


@dataclass(frozen=True)
class Report:
    """A gateway's report about itself.

    Attributes:
        asked_s: when the picker requested it.
        ready: whether the gateway takes new requests.
        running, waiting: numbers of requests.
    """

    asked_s: float
    ready: bool
    running: float
    waiting: float


@dataclass(frozen=True)
class PickRequest:
    """A request, with what the choice of a gateway needs.

    Attributes:
        key: the conversation's key; None: no gateway is preferred.
        tokens: estimated tokens of prompt and output.
        subset: allowed gateways, as host:port or host; None: all.
        sheddable: refuse the request if requests wait on all gateways.
    """

    key: bytes | None = None
    tokens: int = 0
    subset: frozenset[str] | None = None
    sheddable: bool = False


@dataclass(frozen=True)
class Picked:
    """The chosen gateways, as host:port, in the order in which the proxy should try them."""

    addresses: tuple[str, ...]
    affinity: Affinity


@dataclass(eq=False)
class _Gateway:
    """The state of one gateway, as the picker knows it.

    Attributes:
        doubted_s: when a request failed to reach it; only a later report makes it ready again.
        sent: times and weights of sent requests that its report does not include.
    """

    address: str
    report: Report | None = None
    doubted_s: float = float("-inf")
    sent: deque[tuple[float, float]] = field(default_factory=deque)
    sent_weight: float = 0.0

    @property
    def load(self) -> float:
        """The load, in requests of mean size."""
        reported = 0.0 if self.report is None else self.report.running + self.report.waiting
        return reported + self.sent_weight

    def send(self, now_s: float, weight: float) -> None:
        self.sent.append((now_s, weight))
        self.sent_weight += weight

    def update(self, report: Report) -> None:
        self.report = report
        while self.sent and self.sent[0][0] < report.asked_s - _ON_ITS_WAY_S:
            self.sent.popleft()
        self.sent_weight = sum(weight for _, weight in self.sent)

    def is_ready(self, now_s: float, stale_s: float) -> bool:
        report = self.report
        return report is not None and report.ready and self.doubted_s < report.asked_s >= now_s - stale_s


class GatewayChoice:
    """Chooses among all known gateways.

    Args:
        stale_s: age at which a report is no longer used.
        fallbacks: number of additional addresses in each answer.
        shed_waiting: refuse sheddable requests if at least this many requests wait on every gateway.
    """

    def __init__(self, *, stale_s: float, fallbacks: int, shed_waiting: int) -> None:
        self._stale_s = stale_s
        self._fallbacks = fallbacks
        self._shed_waiting = shed_waiting
        self._gateways: dict[str, _Gateway] = {}
        self._mean_tokens = 0.0
        self._turn = 0

    def set_addresses(self, addresses: Set[str]) -> None:
        """Sets the addresses of all gateways, as host:port."""
        self._gateways = {each: self._gateways.get(each) or _Gateway(each) for each in sorted(addresses)}

    def report(self, address: str, report: Report) -> None:
        if (gateway := self._gateways.get(address)) is not None:
            gateway.update(report)

    def lost(self, address: str) -> None:
        """Notes that a gateway cannot be reached."""
        if (gateway := self._gateways.get(address)) is not None:
            gateway.report = None

    def doubt(self, address: str, now_s: float) -> None:
        """Notes that a request did not reach the gateway."""
        if (gateway := self._gateways.get(address)) is not None:
            gateway.doubted_s = now_s

    def count(self, now_s: float) -> tuple[int, int]:
        """Returns how many gateways are ready, and how many are not."""
        ready = sum(gateway.is_ready(now_s, self._stale_s) for gateway in self._gateways.values())
        return ready, len(self._gateways) - ready

    def pick(self, wanted: PickRequest, now_s: float) -> Picked:
        """Chooses the gateway for a request, and counts the request as sent.

        Raises:
            NoNode: no allowed gateway is ready.
            Overloaded: the request is sheddable, and requests wait on all gateways.
        """
        allowed = list(_allowed(self._gateways.values(), wanted.subset))
        ready = [each for each in allowed if each.is_ready(now_s, self._stale_s)]
        if not ready:
            message = f"none of the {len(allowed)} gateways that may serve the request is ready"
            raise NoNode(message, cure="retry the request", retry_after_s=_RETRY_S)
        if wanted.sheddable and all(each.report and each.report.waiting >= self._shed_waiting for each in ready):
            message = "requests wait on all gateways, and this request's objective is sheddable"
            raise Overloaded(message, cure="retry later", retry_after_s=_RETRY_S)
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
        """Returns the request's size relative to the mean."""
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
