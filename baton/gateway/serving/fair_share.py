"""A queue that gives clients equal shares of the work, by what each request costs. Pure.

This is start-time fair queueing: serving a request advances its client's clock by the request's cost, and the client
with the earliest clock goes next. A client that returns after a pause starts at the queue's time, so no client saves up
shares. A client's own requests go by priority, then by arrival. Clients choose priorities themselves, so a priority
better than 0 only puts a request before its own client's; a worse one puts it after the requests of all clients.
"""

from bisect import insort
from typing import NamedTuple

_IDLE_MAX = 1024  # clients whose clock is remembered while nothing of theirs waits


class Waiting(NamedTuple):
    """A request in the queue; the unit of `cost` is the same for all."""

    key: int
    client: str
    cost: float
    priority: int = 0

    @property
    def level(self) -> int:
        """All requests of a lower level go first, whoever sent them."""
        return max(0, self.priority)


class FairShare:
    """Waiting requests, in the order of their clients' clocks."""

    def __init__(self) -> None:
        self._time = 0.0
        # Cost of all that a client was served, or the queue's time when it came, whichever is more.
        self._clocks: dict[str, float] = {}
        self._active: dict[str, list[Waiting]] = {}  # what waits, by client, priority and arrival
        self._by_key: dict[int, Waiting] = {}
        self._answers: dict[tuple[str | None, float, int], float] = {}  # of `cost_before`, until something changes

    def push(self, waiting: Waiting) -> None:
        assert waiting.key not in self._by_key, f"request {waiting.key} waits already"
        self._clocks[waiting.client] = self._clock(waiting.client)
        insort(self._active.setdefault(waiting.client, []), waiting, key=lambda each: each.priority)
        self._answers.clear()
        self._by_key[waiting.key] = waiting

    @property
    def first(self) -> Waiting | None:
        """The request whose turn it is."""
        return min((queue[0] for queue in self._active.values()), key=self._turn, default=None)

    def heads(self) -> list[Waiting]:
        """The next request of each client, in the order of their turns."""
        return sorted((queue[0] for queue in self._active.values()), key=self._turn)

    def serve(self, key: int) -> None:
        """Removes the request, and charges its client."""
        waiting = self._by_key[key]
        self._time = max(self._time, self._clocks[waiting.client])
        self.charge(waiting.client, waiting.cost)
        self.remove(key)

    def charge(self, name: str, cost: float) -> None:
        """Advances the client's clock: a request was served without waiting, or its cost turned out different."""
        self._clocks[name] = max(self._time, self._clock(name) + cost)
        self._answers.clear()
        self._forget()

    def remove(self, key: int) -> None:
        """Removes the request without a charge, if it is in the queue."""
        if (waiting := self._by_key.pop(key, None)) is None:
            return
        queue = self._active[waiting.client]
        queue.remove(waiting)
        if not queue:
            del self._active[waiting.client]
        if not self._active:  # what clients got while there was enough for all is not a debt
            self._time = max(self._time, *self._clocks.values())
            self._clocks.clear()
        self._answers.clear()
        self._forget()

    def cost_before(self, name: str, priority: int) -> float:
        """Cost of the requests that will be served before a new request of this client.

        While nothing changes, only the first question about a client takes time, so refusals cost little under
        overload; clients with nothing here ask the same one.
        """
        question = name if name in self._active else None, self._clock(name), priority
        if question not in self._answers:
            self._answers[question] = self._cost_before(*question)
        return self._answers[question]

    def _cost_before(self, name: str | None, start: float, priority: int) -> float:
        level, own = max(0, priority), self._active.get(name, ()) if name is not None else ()
        before = sum(each.cost for each in own if each.priority <= priority)
        start += before
        for client, queue in self._active.items():
            if client == name:
                continue
            clock = self._clocks[client]
            for waiting in queue:
                if (waiting.level, clock) > (level, start):
                    break
                before += waiting.cost
                clock += waiting.cost
        return before

    def num_waiting(self, name: str) -> int:
        return len(self._active.get(name, ()))

    def newest_of_largest(self) -> list[Waiting]:
        """The requests of the client whose requests cost most, in the order in which it loses them."""
        queues = self._active.values()
        return max(queues, key=lambda queue: sum(each.cost for each in queue), default=[])[::-1]

    def _turn(self, head: Waiting) -> tuple[int, float]:
        return head.level, self._clocks[head.client]

    def _clock(self, name: str) -> float:
        clock = self._clocks.get(name, 0.0)
        return clock if name in self._active else max(self._time, clock)

    def _forget(self) -> None:
        """Bounds the number of idle clients' clocks. Clocks behind the queue's time have no effect and go first."""
        if len(self._clocks) - len(self._active) <= _IDLE_MAX:
            return
        idle = {name: clock for name, clock in self._clocks.items() if name not in self._active}
        behind = [name for name, clock in idle.items() if clock <= self._time]
        for name in behind or [min(idle, key=idle.__getitem__)]:
            del self._clocks[name]
