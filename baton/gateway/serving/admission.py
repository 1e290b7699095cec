"""Decides which requests run now, wait, or are refused, so that overload costs no goodput. Pure: no clock, no task.

Requests wait here and not on the nodes, so a request that is refused or dropped has cost the nodes nothing.
docs/admission.md has the control law with its formulas and constants.
"""

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from baton.core.errors import Overloaded
from baton.gateway.core.shared_counters import Count
from baton.gateway.serving.admission_pace import (
    AdmissionPace,
    AdmissionRequest,
    StandingQueue,
    StartRate,
    StreamBound,
)
from baton.gateway.serving.fair_share import FairShare, Waiting
from baton.gateway.serving.node_capacity import LIGHT_SHARE, REPORT_S, ClusterCapacity

# Begin what is wrong with requests that were taken, and given up while they waited.
TOO_LATE, NO_ROOM = "it can no longer finish in time", "no room within"
_WAIT_SHARE = 0.08  # share of the slack (time to the deadline minus service time) that a request may wait
_SERVICE_SHARE = 0.7  # share of the time to the deadline that the predicted service may take on busy nodes
_STANDING_SHARE = 0.5  # of `queue_s`: shortest wait that makes a standing queue, its interval, and its limit on waits
_MEASURE_S = 0.25  # between two measurements of the running streams
_LEAST_TOKENS = 8  # fewest tokens for a measurement
_RETURN_S = 60.0  # longest retry-after; a client also counts as present for this long after its last request


class AdmissionRefusal(NamedTuple):
    """A request that was waiting and will not run."""

    key: int
    reason: Count
    error: Overloaded


class Admission:
    """Admits the requests of one gateway process.

    Args:
        most: maximum number of outputs in the gateway, running or waiting.
        queue_s: longest time that a request may wait.
        on_refused: called with the reason of each refusal, and 1.
    """

    def __init__(
        self, *, most: int, queue_s: float, on_refused: Callable[[Count, int], object] = lambda _reason, _number: None
    ) -> None:
        self.pace = AdmissionPace()
        self.counts: Counter[Count] = Counter()
        self._on_refused = on_refused
        self._streams = StreamBound()
        self._most, self._queue_s = most, queue_s
        self._queue = FairShare()
        self._waiting: dict[int, AdmissionRequest] = {}
        self._charged: dict[int, float] = {}  # of requests that run after waiting
        self._here: Counter[str] = Counter()  # outputs by client
        self._seen: dict[str, float] = {}  # when each client last asked
        self._largest = 0  # outputs of the client that has most of them here
        self._spares = False  # streams are kept fast for light clients
        self._rate = StartRate()
        self._standing = StandingQueue(_STANDING_SHARE * queue_s, _STANDING_SHARE * queue_s)
        self._measured_s, self._seconds, self._tokens = 0.0, 0.0, 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_light(self, client: str) -> bool:
        """Whether the client has far fewer requests here than the largest one."""
        return self._here[client] <= LIGHT_SHARE * self._largest

    def measures(self, now_s: float) -> bool:
        """Whether it is time to call `progressed` for all streams."""
        return now_s >= self._measured_s + _MEASURE_S

    def progressed(self, seconds: float, tokens: int, capacity: ClusterCapacity, now_s: float) -> None:
        """Records the progress of all running streams since the last call: their tokens, and the sum of their times."""
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        if not self.measures(now_s):
            return
        self._seen = {name: at_s for name, at_s in self._seen.items() if now_s - at_s <= _RETURN_S}
        self._look_at_clients()
        self._measured_s = now_s
        if self._tokens >= _LEAST_TOKENS and self._seconds > 0:
            token_s, self._seconds, self._tokens = self._seconds / self._tokens, 0.0, 0
            self.pace.progressed(token_s, capacity, now_s)
            self._streams.measured(token_s, capacity, spares=self._spares)

    def enter(self, client: str, outputs: int, here: int, now_s: float) -> list[AdmissionRefusal]:
        """Counts a new request with so many outputs; `leave` must follow. Returns the waiting requests evicted for it.

        Args:
            here: outputs that run or wait in the whole gateway, over all processes.

        Raises:
            Overloaded: the gateway is full, and no other client has more requests than this one.
        """
        self._seen[client] = now_s
        over, evicted = here + outputs - self._most, list[AdmissionRefusal]()
        if over > 0 and not self._may_exceed(client, outputs, here):
            cure = "try again later, or raise BATON_MAX_CONCURRENT_REQUESTS"
            why = f"{here} requests are running already, of at most {self._most}"
            full = Overloaded(why, cure=cure, retry_after_s=1.0)
            for last in self._making_way(client, outputs, over):
                evicted.append(self._refuse_waiting(last, Count.REFUSED_FULL, full, now_s))
            if not evicted:
                self._count(Count.REFUSED_FULL)
                raise full
        self._here[client] += outputs
        if not self._spares and (self._here[client] > self._largest or self.is_light(client)):
            self._look_at_clients()  # a burst would start before the next measurement
        return evicted

    def leave(self, client: str, outputs: int) -> None:
        """Removes a request that has ended, in whatever way."""
        self._here[client] -= outputs
        if self._here[client] <= 0:
            del self._here[client]

    def check_early(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> None:
        """Refuses a hopeless request before any work is done for it; `asked` is a lower bound of what it needs.

        Raises:
            Overloaded: `offer` would refuse it in any case.
        """
        self._seen[asked.client] = now_s
        if not self._starts(asked, capacity, now_s):
            self._check(asked, capacity, now_s)

    def offer(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> bool:
        """Returns True if the request starts now, False if it waits until `take` returns it or `withdraw` removes it.

        Raises:
            Overloaded: it would wait too long, or finish too late.
        """
        cost = asked.cost(asked.outputs * self.pace.expected_tokens(asked))
        if self._starts(asked, capacity, now_s):
            if self._waiting:
                self._queue.charge(asked.client, cost)
                self._charged[asked.key] = cost
            else:
                self._standing.look(now_s, waited_s=0.0)
            return True
        self._check(asked, capacity, now_s)
        self._queue.push(Waiting(asked.key, asked.client, cost, asked.priority))
        self._waiting[asked.key] = asked
        self._rate.waits(now_s)
        return False

    def withdraw(self, key: int, now_s: float) -> None:
        """Removes the request from the queue, if it is waiting."""
        self._queue.remove(key)
        if self._waiting.pop(key, None) is not None and not self._waiting:
            self._rate.waits(now_s, waits=False)

    def take(self, capacity: ClusterCapacity, now_s: float) -> int | None:
        """Returns the next waiting request to start now, if any. Call it again with the remaining capacity."""
        first = self._queue.first
        if first is None:
            return None
        # Streams are limited so that light clients' streams are fast, so light clients need not wait for that.
        heads = self._queue.heads()[1:] if self._spares else []
        turns = [first, *(head for head in heads if self.is_light(head.client))]
        taken = next((each for each in turns if self._may_start(self._waiting[each.key], capacity, now_s)), None)
        if taken is None:
            return None
        self._charged[taken.key] = taken.cost
        self._rate.started(taken.cost, now_s)
        self._standing.look(now_s, waited_s=now_s - self._waiting[taken.key].arrived_s)
        self._queue.serve(taken.key)
        self.withdraw(taken.key, now_s)
        return taken.key

    def shed(self, capacity: ClusterCapacity, now_s: float) -> list[AdmissionRefusal]:
        """Removes waiting requests that have waited too long, or can no longer finish in time."""
        refused = []
        for key, asked in list(self._waiting.items()):
            # If the nodes have room for it, only its deadline keeps it waiting, and waiting makes that worse.
            blocks = not self._is_safe(asked, capacity, now_s) and self._has_place(asked, capacity)
            if blocks or max(self._overrun_s(asked, capacity, now_s), self._ttft_overrun_s(asked, capacity, now_s)) > 0:
                error = _overloaded(TOO_LATE, 1.0)
                refused.append(self._refuse_waiting(key, Count.SHED, error, now_s))
            elif now_s - asked.arrived_s >= self._queue_s:
                error = _overloaded(f"{NO_ROOM} {self._queue_s:g} s", 1.0)
                refused.append(self._refuse_waiting(key, Count.REFUSED_QUEUE, error, now_s))
        return refused

    def settle(self, asked: AdmissionRequest, tokens: int) -> None:
        """Charges the client of a finished request for its actual tokens. Requests that started without waiting are
        free."""
        charged = self._charged.pop(asked.key, None)
        if charged is not None:
            self._queue.charge(asked.client, asked.cost(tokens) - charged)

    # ----

    def _look_at_clients(self) -> None:
        self._largest = max(self._here.values(), default=0)
        self._spares = self._largest >= 1 / LIGHT_SHARE and any(self.is_light(client) for client in self._seen)

    def _may_exceed(self, client: str, outputs: int, here: int) -> bool:
        """Whether a client with few requests may exceed the limit a little, so that idle streams cannot lock it out."""
        share = self._most // (2 * (len(self._here) + 1))
        others = len(self._here) > (client in self._here)
        return others and self._here[client] + outputs <= share and here + outputs <= self._most + self._most // 4

    def _making_way(self, client: str, outputs: int, over: int) -> list[int]:
        """The newest waiting requests of the largest client, if it has more than this client and enough are waiting."""
        making: list[int] = []
        for last in self._queue.newest_of_largest():
            if over > 0 and last.client != client and self._here[last.client] > self._here[client] + outputs:
                over -= self._waiting[last.key].outputs
                making.append(last.key)
        return making if over <= 0 else []

    def _starts(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> bool:
        if asked.deadline_s is not None and asked.deadline_s <= now_s:
            return True  # it then fails with its own error
        return (not self._waiting or self._overtakes(asked)) and self._may_start(asked, capacity, now_s)

    def _overtakes(self, asked: AdmissionRequest) -> bool:
        """Whether this light client may pass a queue that exists only to protect light clients."""
        light = self._spares and self.is_light(asked.client)
        return light and asked.priority <= 0 and not self._queue.num_waiting(asked.client)

    def _may_start(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> bool:
        return self._has_place(asked, capacity) and self._is_safe(asked, capacity, now_s)

    def _has_place(self, asked: AdmissionRequest, capacity: ClusterCapacity) -> bool:
        shared = self._spares and not self.is_light(asked.client)
        most = self._streams.most(capacity) if shared else inf
        return capacity.has(asked.prompt_tokens, asked.outputs, shared=shared, most=most)

    def _is_safe(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> bool:
        """Whether the request would end well before its deadline, or nodes are so idle that trying costs nothing."""
        return capacity.is_light or self._overrun_s(asked, capacity, now_s, _SERVICE_SHARE) <= 0

    def _overrun_s(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float, share: float = 1.0) -> float:
        """Predicted overrun of this share of the time until the deadline, if the request started now."""
        if asked.deadline_s is None:
            return -inf
        return self.pace.service_s(asked, capacity, now_s) - share * (asked.deadline_s - now_s)

    def _ttft_overrun_s(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> float:
        """Predicted TTFT overrun in seconds, if the request started now; at most 0 means on time."""
        if asked.first_due_s is None:
            return -inf
        return now_s + self.pace.ttft_s(asked, capacity, now_s) - asked.first_due_s

    def _check(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> None:
        """Raises Overloaded if a request should not even wait."""
        rate = self._rate.at(now_s, least_s=_MEASURE_S)
        wait_s = self._queue.cost_before(asked.client, asked.priority) / rate if rate is not None else 0.0
        self._standing.look(now_s)
        most_s, reason = (_STANDING_SHARE if self._standing.stands else 1.0) * self._queue_s, Count.REFUSED_QUEUE
        overrun_s = self._overrun_s(asked, capacity, now_s)
        ttft_overrun_s = self._ttft_overrun_s(asked, capacity, now_s) + wait_s
        if -_WAIT_SHARE * overrun_s < most_s:
            most_s, reason = -_WAIT_SHARE * overrun_s, Count.REFUSED_DEADLINE
        if overrun_s > 0 and asked.deadline_s is not None:
            left_s = asked.deadline_s - now_s
            error = _overloaded(
                f"it would take {left_s + overrun_s:.3g} s and has {left_s:.3g} s", max(wait_s, overrun_s)
            )
        elif ttft_overrun_s > 0:
            reason = Count.REFUSED_DEADLINE
            error = _overloaded(f"its first token would come {ttft_overrun_s:.3g} s after it is due", ttft_overrun_s)
        elif wait_s > most_s or self._queue_s <= 0:
            error = _overloaded(f"expected wait {wait_s:.3g} s exceeds the allowed {most_s:.3g} s", wait_s - most_s)
        else:
            return
        self._count(reason)
        raise error

    def _refuse_waiting(self, key: int, reason: Count, error: Overloaded, now_s: float) -> AdmissionRefusal:
        self._count(reason)
        self.withdraw(key, now_s)
        return AdmissionRefusal(key, reason, error)

    def _count(self, reason: Count) -> None:
        self.counts[reason] += 1
        self._on_refused(reason, 1)


def _overloaded(why: str, after_s: float) -> Overloaded:
    hint_s = min(_RETURN_S, max(REPORT_S, after_s))
    cure = f"retry after {hint_s:.3g} s, or allow more time"
    return Overloaded(f"overloaded: {why}", cure=cure, retry_after_s=hint_s)
