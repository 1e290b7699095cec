"""Circuit breakers: a node on which requests keep failing gets none for a while, then one as a trial. Pure.

    closed ── errors in a row ──► open ── time ──► half open ── an answer ──► closed
                                   ▲                   └─ an error ─┐
                                   └──── twice the time ────────────┘

Such a node is alive, reports its status and fails requests at once, so without a breaker it would attract them.
"""

from dataclasses import dataclass

_ERRORS_IN_A_ROW = 3
_OPEN_S = 1.0
_OPEN_MOST_S = 30.0


@dataclass
class _Breaker:
    """The breaker of one node.

    Attributes:
        errors: errors since the last answer.
        open_until_s: time before which the node gets no requests; None: the breaker is closed.
        open_s: length of the last open period.
        on_trial: whether the breaker is half open and its trial request has been sent.
    """

    errors: int = 0
    open_until_s: float | None = None
    open_s: float = 0.0
    on_trial: bool = False


class Breakers:
    """One breaker for each node, by incarnation, so a restarted node starts with a closed one."""

    def __init__(self) -> None:
        self._breakers: dict[int, _Breaker] = {}
        self._stuck: set[int] = set()

    def reported(self, incarnation: int, *, stuck: bool) -> None:
        """Records whether the node's status says that it is stuck. Its running requests end by their stall timeouts."""
        if stuck:
            self._stuck.add(incarnation)
        else:
            self._stuck.discard(incarnation)

    def failed(self, incarnation: int, now_s: float) -> None:
        """Counts a request that failed inside the node."""
        breaker = self._breakers.setdefault(incarnation, _Breaker())
        breaker.errors += 1
        if breaker.open_until_s is not None and now_s < breaker.open_until_s and not breaker.on_trial:
            return  # the request was sent before the breaker opened
        if breaker.on_trial or breaker.errors >= _ERRORS_IN_A_ROW:
            breaker.open_s = min(2 * breaker.open_s or _OPEN_S, _OPEN_MOST_S)
            breaker.open_until_s, breaker.on_trial = now_s + breaker.open_s, False

    def answered(self, incarnation: int) -> None:
        """Closes the breaker: the node has done its part of a request."""
        self._breakers.pop(incarnation, None)

    def chosen(self, incarnation: int, now_s: float) -> None:
        """Marks a request that is sent to a node with a half open breaker as the trial."""
        breaker = self._breakers.get(incarnation)
        if breaker is not None and breaker.open_until_s is not None and now_s >= breaker.open_until_s:
            # A trial that is cancelled, or whose node is lost, reports no result: another one follows.
            breaker.on_trial, breaker.open_until_s = True, now_s + breaker.open_s

    def open(self, now_s: float) -> frozenset[int]:
        """Incarnations of the nodes that should get no request now."""
        return frozenset(self._stuck).union(
            incarnation
            for incarnation, breaker in self._breakers.items()
            if breaker.open_until_s is not None and now_s < breaker.open_until_s
        )

    def forget(self, incarnation: int) -> None:
        """Drops the breaker of a removed or restarted node."""
        self._breakers.pop(incarnation, None)
        self._stuck.discard(incarnation)
