"""Fair shares of a queue between clients, by the cost of what each gets. Pure.

Start-time fair queueing: each client has a clock, which moves on by the cost of every request that it is served, and
the client whose clock is behind goes next. A client that returns after a pause starts at the present time of the queue,
so nobody saves shares up. Among a client's own requests the priority decides, then the order of arrival.

Priorities are the clients' own choice. So one that is better than the usual 0 lifts a request over others of its own
client only, while a worse one puts it after the requests of all clients.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

# Clocks of clients that have nothing waiting are kept only while they are ahead, and of at most so many clients.
_IDLE_MAX = 1024


class Waiting(NamedTuple):
    """A request in the queue.

    Args:
        key: names the request.
        cost: in any unit that is the same for all.
    """

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
    """Attributes:
    clock: cost of all that it was served, or the queue's time when it came, whichever is more.
    queue: sorted by priority, then by arrival.
    cost: of all in the queue.
    """

    clock: float
    queue: list[tuple[int, int, Waiting]] = field(default_factory=list)
    cost: float = 0.0

    @property
    def first(self) -> Waiting:
        return self.queue[0][2]


class FairShare:
    """The queue."""

    def __init__(self) -> None:
        self._time = 0.0
        self._arrivals = 0
        self._active: dict[str, _Client] = {}  # with requests that wait
        self._idle: dict[str, float] = {}  # clocks that are ahead
        self._by_key: dict[int, Waiting] = {}
        self._answers: dict[tuple[str | None, float, int], float] = {}  # of `cost_before`, until something changes

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def push(self, waiting: Waiting) -> None:
        assert waiting.key not in self._by_key, f"request {waiting.key} waits already"
        client = self._active.get(waiting.client)
        if client is None:
            client = self._active[waiting.client] = _Client(max(self._time, self._idle.pop(waiting.client, 0.0)))
        self._arrivals += 1
        self._answers.clear()
        insort(client.queue, (waiting.priority, self._arrivals, waiting))
        client.cost += waiting.cost
        self._by_key[waiting.key] = waiting

    @property
    def first(self) -> Waiting | None:
        """The request whose turn it is."""
        if not self._active:
            return None
        return min(self._active.values(), key=lambda client: (client.first.level, client.clock)).first

    def heads(self) -> list[Waiting]:
        """The next request of each client, in the order of their turns."""
        clients = sorted(self._active.values(), key=lambda client: (client.first.level, client.clock))
        return [client.first for client in clients]

    def serve(self, key: int) -> None:
        """Removes the request, and charges its client."""
        waiting = self._by_key[key]
        client = self._active[waiting.client]
        self._answers.clear()
        self._time = max(self._time, client.clock)
        client.clock += waiting.cost
        self.remove(key)

    def charge(self, name: str, cost: float) -> None:
        """Moves the client's clock: a request was served without waiting, or its cost turned out to be another."""
        self._answers.clear()
        client = self._active.get(name)
        if client is not None:
            client.clock = max(self._time, client.clock + cost)
            return
        clock = max(self._time, self._idle.pop(name, 0.0)) + cost
        if clock > self._time:
            self._keep_idle(name, clock)

    def remove(self, key: int) -> bool:
        """Removes the request without a charge. False: it was not in the queue."""
        waiting = self._by_key.pop(key, None)
        if waiting is None:
            return False
        self._answers.clear()
        client = self._active[waiting.client]
        client.queue = [entry for entry in client.queue if entry[2].key != key]
        client.cost -= waiting.cost
        if not client.queue:
            del self._active[waiting.client]
            if client.clock > self._time:
                self._keep_idle(waiting.client, client.clock)
            if not self._active:
                self._rest()
        return True

    def cost_before(self, name: str, priority: int) -> float:
        """Cost of what will be served before a request of this client that comes now. While nothing changes, only the
        first question about a client takes time; clients with nothing here ask the same one."""
        own = self._active.get(name)
        start = max(self._time, self._idle.get(name, 0.0)) if own is None else own.clock
        question = None if own is None else name, start, priority
        known = self._answers.get(question)
        if known is None:
            known = self._answers[question] = self._cost_before(own, start, priority)
        return known

    def _cost_before(self, own: _Client | None, start: float, priority: int) -> float:
        level, before = max(0, priority), 0.0
        if own is not None:
            last = own.queue[-1][0]
            before = own.cost if last <= priority else sum(each.cost for rank, _, each in own.queue if rank <= priority)
            start += before
        for client in self._active.values():
            if client is own or (client.clock > start and client.first.level >= level):
                continue
            if client.clock + client.cost <= start and client.queue[-1][2].level <= level:
                before += client.cost
                continue
            clock = client.clock
            for _, _, waiting in client.queue:
                if waiting.level > level or (waiting.level == level and clock > start):
                    break
                before += waiting.cost
                clock += waiting.cost
        return before

    def num_waiting(self, name: str) -> int:
        client = self._active.get(name)
        return 0 if client is None else len(client.queue)

    def newest_of_largest(self) -> Waiting | None:
        """The request to lose first: of the client whose waiting requests cost most, the last one of the worst
        priority."""
        if not self._active:
            return None
        return max(self._active.values(), key=lambda client: client.cost).queue[-1][2]

    def newest_of(self, name: str) -> Waiting:
        """The last request of the worst priority of a client that has some."""
        return self._active[name].queue[-1][2]

    def keys(self) -> list[int]:
        return list(self._by_key)

    def _keep_idle(self, name: str, clock: float) -> None:
        self._idle[name] = clock
        if len(self._idle) > _IDLE_MAX:
            self._idle = {each: at for each, at in self._idle.items() if at > self._time}
        if len(self._idle) > _IDLE_MAX:
            del self._idle[min(self._idle, key=self._idle.__getitem__)]

    def _rest(self) -> None:
        """Nobody waits: what clients got while there was enough for all is no debt."""
        self._time = max(self._idle.values(), default=self._time)
        self._idle.clear()
