"""A queue that gives clients equal shares of the work, by what each request costs. Pure.

It is start-time fair queueing: serving a request moves its client's clock by the request's cost, and the client with
the earliest clock goes next. A client that returns after a pause starts at the queue's time, so nobody saves shares up.
Among a client's own requests the priority decides, then arrival. Clients choose priorities themselves, so one better
than the usual 0 lifts a request over its own client's only; a worse one puts it after the requests of all clients.
"""

from bisect import insort
from dataclasses import dataclass, field
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


@dataclass
class _Client:
    clock: float  # cost of all that it was served, or the queue's time when it came, whichever is more
    queue: list[Waiting] = field(default_factory=list)  # by priority, then by arrival
    cost: float = 0.0  # of all in the queue

    @property
    def turn(self) -> tuple[int, float]:
        return self.queue[0].level, self.clock


class FairShare:
    """The queue."""

    def __init__(self) -> None:
        self._time = 0.0
        self._active: dict[str, _Client] = {}  # with requests that wait
        self._idle: dict[str, float] = {}  # clocks that are ahead of the queue's time
        self._by_key: dict[int, Waiting] = {}
        self._answers: dict[tuple[str | None, float, int], float] = {}  # of `cost_before`, until something changes

    def push(self, waiting: Waiting) -> None:
        assert waiting.key not in self._by_key, f"request {waiting.key} waits already"
        if (client := self._active.get(waiting.client)) is None:
            client = self._active[waiting.client] = _Client(self._clock(waiting.client))
            self._idle.pop(waiting.client, None)
        insort(client.queue, waiting, key=lambda each: each.priority)
        client.cost += waiting.cost
        self._answers.clear()
        self._by_key[waiting.key] = waiting

    @property
    def first(self) -> Waiting | None:
        """The request whose turn it is."""
        client = min(self._active.values(), key=lambda client: client.turn, default=None)
        return None if client is None else client.queue[0]

    def heads(self) -> list[Waiting]:
        """The next request of each client, in the order of their turns."""
        return [client.queue[0] for client in sorted(self._active.values(), key=lambda client: client.turn)]

    def serve(self, key: int) -> None:
        """Removes the request, and charges its client."""
        waiting = self._by_key[key]
        self._time = max(self._time, self._active[waiting.client].clock)
        self.charge(waiting.client, waiting.cost)
        self.remove(key)

    def charge(self, name: str, cost: float) -> None:
        """Moves the client's clock: a request was served without waiting, or its cost turned out to be another."""
        clock = max(self._time, self._clock(name) + cost)
        self._answers.clear()
        if (client := self._active.get(name)) is not None:
            client.clock = clock
        else:
            self._keep_idle(name, clock)

    def remove(self, key: int) -> None:
        """Removes the request without a charge, if it is in the queue."""
        if (waiting := self._by_key.pop(key, None)) is None:
            return
        client = self._active[waiting.client]
        client.queue.remove(waiting)
        client.cost -= waiting.cost
        self._answers.clear()
        if not client.queue:
            del self._active[waiting.client]
            self._keep_idle(waiting.client, client.clock)
        if not self._active:  # what clients got while there was enough for all is no debt
            self._time = max(self._idle.values(), default=self._time)
            self._idle.clear()

    def cost_before(self, name: str, priority: int) -> float:
        """Cost of what will be served before a request of this client that comes now.

        While nothing changes, only the first question about a client takes time, so refusals cost little under
        overload; clients with nothing here ask the same one.
        """
        own = self._active.get(name)
        question = None if own is None else name, self._clock(name), priority
        if question not in self._answers:
            self._answers[question] = self._cost_before(own, self._clock(name), priority)
        return self._answers[question]

    def _cost_before(self, own: _Client | None, start: float, priority: int) -> float:
        level, before = max(0, priority), 0.0
        if own is not None:
            last = own.queue[-1].priority
            before = own.cost if last <= priority else sum(each.cost for each in own.queue if each.priority <= priority)
            start += before
        for client in self._active.values():
            if client is own or (client.clock > start and client.queue[0].level >= level):
                continue
            if client.clock + client.cost <= start and client.queue[-1].level <= level:
                before += client.cost
                continue
            clock = client.clock
            for waiting in client.queue:
                if (waiting.level, clock) > (level, start):
                    break
                before += waiting.cost
                clock += waiting.cost
        return before

    def num_waiting(self, name: str) -> int:
        return len(self._active[name].queue) if name in self._active else 0

    def newest_of_largest(self) -> list[Waiting]:
        """The requests of the client whose requests cost most, in the order in which it loses them."""
        client = max(self._active.values(), key=lambda client: client.cost, default=None)
        return [] if client is None else client.queue[::-1]

    def _clock(self, name: str) -> float:
        client = self._active.get(name)
        return client.clock if client is not None else max(self._time, self._idle.get(name, 0.0))

    def _keep_idle(self, name: str, clock: float) -> None:
        self._idle[name] = clock
        if clock <= self._time or len(self._idle) > _IDLE_MAX:
            self._idle = {each: at for each, at in self._idle.items() if at > self._time}
        if len(self._idle) > _IDLE_MAX:
            del self._idle[min(self._idle, key=self._idle.__getitem__)]
