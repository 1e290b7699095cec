"""Circuit breakers: a node whose requests keep failing inside it gets none for a while, then one as a trial. Pure.

    closed ── errors in a row ──► open ── time ──► half open ── an answer ──► closed
                                   ▲                   └─ an error ─┐
                                   └──── twice the time ────────────┘

A node that is broken in this way is alive, reports a status, and answers at once, so it would draw requests.
"""

from dataclasses import dataclass

_ERRORS_IN_A_ROW = 3
_OPEN_S = 1.0
_OPEN_MOST_S = 30.0


@dataclass
class _Breaker:
    """The breaker of one node.

    Attributes:
        errors: since the last answer.
        open_until_s: it gets no requests before; None: it is closed.
        open_s: how long it was open the last time.
        on_trial: it is half open, and a request was sent as its trial.
    """

    errors: int = 0
    open_until_s: float | None = None
    open_s: float = 0.0
    on_trial: bool = False


class Breakers:
    """One for each node, by incarnation: a restarted node begins anew."""

    def __init__(self) -> None:
        self._breakers: dict[int, _Breaker] = {}
        self._stuck: set[int] = set()

    def reported(self, incarnation: int, *, stuck: bool) -> None:
        """The node says whether it makes progress. Requests that it has find out themselves, after a stall."""
        if stuck:
            self._stuck.add(incarnation)
        else:
            self._stuck.discard(incarnation)

    def failed(self, incarnation: int, now_s: float) -> None:
        """A request has failed inside the node."""
        breaker = self._breakers.setdefault(incarnation, _Breaker())
        breaker.errors += 1
        if breaker.open_until_s is not None and now_s < breaker.open_until_s and not breaker.on_trial:
            return  # the request was sent there before
        if breaker.on_trial or breaker.errors >= _ERRORS_IN_A_ROW:
            breaker.open_s = min(2 * breaker.open_s or _OPEN_S, _OPEN_MOST_S)
            breaker.open_until_s, breaker.on_trial = now_s + breaker.open_s, False

    def answered(self, incarnation: int) -> None:
        """The node has done its part of a request."""
        self._breakers.pop(incarnation, None)

    def chosen(self, incarnation: int, now_s: float) -> None:
        """A request is sent to the node: if its breaker is half open, this is the trial."""
        breaker = self._breakers.get(incarnation)
        if breaker is not None and breaker.open_until_s is not None and now_s >= breaker.open_until_s:
            # How a trial ends is not reported if it is cancelled or its node is lost: then another one follows.
            breaker.on_trial, breaker.open_until_s = True, now_s + breaker.open_s

    def open(self, now_s: float) -> frozenset[int]:
        """Incarnations of the nodes that should get no request now."""
        return frozenset(self._stuck).union(
            incarnation
            for incarnation, breaker in self._breakers.items()
            if breaker.open_until_s is not None and now_s < breaker.open_until_s
        )

    def forget(self, incarnation: int) -> None:
        """The node is gone."""
        self._breakers.pop(incarnation, None)
        self._stuck.discard(incarnation)
