"""Which requests run now, wait, or are refused, so that overload costs no goodput. Pure: no clock, task or socket.

Requests wait here rather than on the nodes: nodes get what they work on (`baton.gateway.serving.node_capacity`), so
whatever is refused or given up has cost them nothing. Who is next is a matter of fair shares
(`baton.gateway.serving.fair_share`).

A request is refused as soon as it arrives if its predicted wait is too long, and with a hint when to come again:

    wait = cost of what goes before it / cost that was started per second, while requests waited
    service = time to the first token + tokens * time per token, as measured, at the nodes' present load

With a deadline, wait and service must end in time, and the wait may take only a part of what the service leaves: a
queue is there for bursts, and one that stands makes everybody late. Without a deadline the wait is bounded by
`queue_s`, and by less once a queue stands: when the shortest wait of an interval was over a target (as CoDel, RFC
8289). Because the largest client's next request has the longest predicted wait, its newest requests are those refused.
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from math import exp, inf

from baton.core.errors import Overloaded
from baton.gateway.serving.fair_share import FairShare, Waiting
from baton.gateway.serving.node_capacity import Room
from baton.gateway.serving.stream_limit import StreamBound, StreamProgress

# A decoded token costs a node about as much as so many tokens of a prompt.
_PROMPT_TOKENS_PER_OUTPUT = 8
# Part of the time that the service leaves until the deadline, which a request may wait.
_WAIT_SHARE = 0.08
# Part of the time until the deadline that the predicted service may take when a request starts on busy nodes.
_SERVICE_SHARE = 0.7
# A queue stands if the shortest wait of an interval is over the target; both are parts of `queue_s`.
_TARGET_SHARE, _INTERVAL_SHARE = 0.5, 0.5
# Measured times lose half of their weight, and the prediction half of its size, in so long without a measurement.
_FRESH_S = 3.0
_RATE_S = 3.0
_RATE_LEAST_S = 0.3
_WEIGHT = 0.1
_LIVE_WEIGHT = 0.4  # of what running streams show, several times a second
_LIVE_TOKENS = 8  # that are worth a measurement
_OUTPUT_TOKENS = 200.0  # of a request, before any has ended
_OUTPUT_SHARE = 0.8  # of the requests have no more tokens than expected
_CLIENT_S = 60.0  # a client counts as present for so long after its last request
_CLIENTS_EVERY_S = 0.25
# A client is light if it has at most this share of what the largest client has here.
_LIGHT_SHARE = 0.1
_BURST = 1.5  # so many times what the largest client had at the last look
_HINT_LEAST_S, _HINT_MOST_S = 0.1, 60.0


class Reason(Enum):
    """Why a request does not run."""

    FULL = "too many requests are here"
    QUEUE = "it would wait too long"
    DEADLINE = "it would not be finished in time"
    SHED = "it has waited, and can no longer be in time"


@dataclass(frozen=True)
class AdmissionRequest:
    """What a request wants.

    Args:
        output_tokens: the most that each output may have.
        certain_tokens: that each output will have, unless a stop string ends it.
        outputs: how many are drawn.
        deadline_s: when its client gives up; None: later than any queue is long.
        first_due_s: refuse it if its first token comes later.
    """

    key: int
    client: str
    prompt_tokens: int
    output_tokens: int
    certain_tokens: int
    arrived_s: float
    outputs: int = 1
    priority: int = 0
    deadline_s: float | None = None
    first_due_s: float | None = None


@dataclass(frozen=True)
class AdmissionRefusal:
    """A request that was waiting, and will not run."""

    key: int
    reason: Reason
    error: Overloaded


class Estimate:
    """A measured time: a mean of the last ones, which fades while nothing is measured, so that no old measurement keeps
    requests out for ever."""

    def __init__(self, weight: float = _WEIGHT) -> None:
        self._weight = weight
        self._value = 0.0
        self._at_s = -inf

    def observe(self, value: float, now_s: float) -> None:
        fresh = now_s - self._at_s <= _FRESH_S
        self._value += (value - self._value) * (self._weight if fresh else 0.5 if self._value else 1.0)
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """0 where nothing was measured."""
        stale_s = now_s - self._at_s - _FRESH_S
        return self._value if stale_s <= 0 else self._value * 0.5 ** min(60.0, stale_s / _FRESH_S)


class AdmissionPace:
    """How long requests take on the nodes, as measured here."""

    def __init__(self) -> None:
        self._first_s = Estimate()
        self._token_s = Estimate()
        self._ratio = Estimate()  # of measured and predicted times per token
        self._live_ratio = Estimate(_LIVE_WEIGHT)  # the same, of streams that still run
        self._output_tokens: dict[int, float] = {}  # by the size of the most that was allowed

    def expected_tokens(self, asked: AdmissionRequest) -> int:
        expected = self._output_tokens.get(asked.output_tokens.bit_length(), _OUTPUT_TOKENS)
        return max(asked.certain_tokens, min(asked.output_tokens, round(expected)))

    def cost(self, asked: AdmissionRequest) -> float:
        return _cost(asked, asked.outputs * self.expected_tokens(asked))

    def first_s(self, now_s: float) -> float:
        return self._first_s.at(now_s)

    def service_s(self, asked: AdmissionRequest, room: Room, now_s: float) -> float:
        """Predicted time of a request that starts now."""
        first_s, token_s = self.times_s(room, now_s)
        return first_s + asked.prompt_tokens * room.prompt_token_s + self.expected_tokens(asked) * token_s

    def times_s(self, room: Room, now_s: float) -> tuple[float, float]:
        """Predicted times of a request that starts now: to the first token, less what its own prompt takes, and of each
        further token."""
        token_s = self._token_s.at(now_s)
        if room.step_s is not None:
            token_s = room.step_s * max(1.0, self._ratio.at(now_s), self._live_ratio.at(now_s))
        return max(self.first_s(now_s), room.prefill_wait_s), token_s

    def first_token(self, seconds: float, prompt_tokens: int, room: Room, now_s: float) -> None:
        """A request has got its first token so long after its start, or has waited so long in vain."""
        self._first_s.observe(max(0.0, seconds - prompt_tokens * room.prompt_token_s), now_s)

    def progressed(self, progress: StreamProgress, room: Room, now_s: float) -> None:
        """Running streams show a change of the nodes' speed seconds before they end."""
        if progress.tokens >= _LIVE_TOKENS and room.step_s:
            self._live_ratio.observe(progress.seconds / progress.tokens / room.step_s, now_s)

    def ended(self, tokens: int, most: int, seconds: float, step_s: float | None, now_s: float, *, whole: bool) -> None:
        """An output has ended: `tokens` tokens of at most `most`, the last one so many seconds after the first one.

        Args:
            step_s: `Room.step_s` while it ran.
            whole: it is complete.
        """
        if tokens > 1:
            token_s = seconds / (tokens - 1)
            self._token_s.observe(token_s, now_s)
            if step_s:
                self._ratio.observe(token_s / step_s, now_s)
        size = most.bit_length()
        expected = self._output_tokens.get(size, min(_OUTPUT_TOKENS, most))
        if whole or tokens > expected:
            move = max(1.0, 0.1 * expected)
            expected += move * (_OUTPUT_SHARE if tokens > expected else _OUTPUT_SHARE - 1.0)
            self._output_tokens[size] = max(1.0, expected)


def _cost(asked: AdmissionRequest, tokens: int) -> float:
    return tokens + asked.outputs * asked.prompt_tokens / _PROMPT_TOKENS_PER_OUTPUT


class StartRate:
    """Cost that is started per second, while requests wait."""

    def __init__(self) -> None:
        self._cost = self._busy_s = 0.0
        self._at_s: float | None = None  # None: nobody waits

    def waits(self, now_s: float) -> None:
        if self._at_s is None:
            self._at_s = now_s

    def rests(self, now_s: float) -> None:
        self._pass(now_s)
        self._at_s = None

    def started(self, cost: float, now_s: float) -> None:
        self._pass(now_s)
        self._cost += cost

    def at(self, now_s: float) -> float | None:
        """None: not known, because too little time has passed or nothing was started."""
        self._pass(now_s)
        return self._cost / self._busy_s if self._cost and self._busy_s >= _RATE_LEAST_S else None

    def _pass(self, now_s: float) -> None:
        if self._at_s is not None:
            passed_s = max(0.0, now_s - self._at_s)
            kept = exp(-passed_s / _RATE_S)
            self._cost, self._busy_s, self._at_s = self._cost * kept, self._busy_s * kept + passed_s, now_s


class StandingQueue:
    """Whether a queue stands: the shortest wait of an interval was over the target, and since then none was under half
    of it."""

    def __init__(self, target_s: float, interval_s: float) -> None:
        self.stands = False
        self._target_s = target_s
        self._interval_s = interval_s
        self._shortest_s = inf
        self._ends_s: float | None = None  # None: no interval has begun

    def waited(self, seconds: float, now_s: float) -> None:
        self.look(now_s)
        self._shortest_s = min(self._shortest_s, seconds)

    def look(self, now_s: float, *, waiting: bool = True) -> None:
        if not waiting:
            self.stands, self._shortest_s, self._ends_s = False, 0.0, None
        if self._ends_s is None:
            self._ends_s = now_s + self._interval_s
        if now_s >= self._ends_s:
            self.stands = waiting and self._shortest_s > self._target_s * (0.5 if self.stands else 1.0)
            self._shortest_s, self._ends_s = inf, now_s + self._interval_s


class Admission:
    """All requests of one process of a gateway.

    Args:
        most: how many outputs may be here, running or waiting.
        queue_s: how long a request may wait.
    """

    def __init__(self, *, most: int, queue_s: float) -> None:
        self.pace = AdmissionPace()
        self.streams = StreamBound()
        self.counts: Counter[Reason] = Counter()
        self._most = most
        self._queue_s = queue_s
        self._queue = FairShare()
        self._waiting: dict[int, AdmissionRequest] = {}
        self._charged: dict[int, float] = {}  # of requests that run after waiting
        self._here: Counter[str] = Counter()  # outputs by client
        self._seen: dict[str, float] = {}  # when each client last asked
        self._looked_s = -inf
        self._largest = 0  # outputs of the client that has most of them here
        self._spares = False  # streams are kept fast for light clients
        self._rate = StartRate()
        self._standing = StandingQueue(_TARGET_SHARE * queue_s, _INTERVAL_SHARE * queue_s)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_light(self, client: str) -> bool:
        """Whether the client has far fewer requests here than the largest one."""
        return self._here[client] <= _LIGHT_SHARE * self._largest

    def _look_at_clients(self, now_s: float) -> None:
        if now_s < self._looked_s + _CLIENTS_EVERY_S:
            return
        self._looked_s = now_s
        self._seen = {name: at_s for name, at_s in self._seen.items() if now_s - at_s <= _CLIENT_S}
        self._largest = max(self._here.values(), default=0)
        light = self._largest >= 1 / _LIGHT_SHARE and any(self.is_light(client) for client in self._seen)
        self._spares = light

    def progressed(self, progress: StreamProgress, room: Room, now_s: float) -> None:
        """The streams here have got so many tokens since the last call; call it several times a second."""
        self._look_at_clients(now_s)
        self.pace.progressed(progress, room, now_s)
        self.streams.measured(progress, room, now_s, spares=self._spares)

    # ---- requests come and go

    def enter(self, client: str, outputs: int, here: int, now_s: float) -> list[AdmissionRefusal]:
        """A client brings a request of so many outputs; `leave` must follow. Returns the requests that make way.

        Args:
            here: outputs that run or wait in the whole gateway.

        Raises:
            Overloaded: there are too many, and others' are no more than this client's.
        """
        self._seen[client] = now_s
        over = here + outputs - self._most
        evicted: list[AdmissionRefusal] = []
        if over > 0 and not self._may_exceed(client, outputs, here):
            last = self._queue.newest_of_largest()
            if last is None or not self._gives_way(last.client, to=client, outputs=outputs, over=over):
                self.counts[Reason.FULL] += 1
                raise self._full(here)
            while over > 0:
                last = self._queue.newest_of(last.client)
                over -= self._waiting[last.key].outputs
                evicted.append(self._refuse_waiting(last.key, Reason.FULL, self._full(here)))
        self._here[client] += outputs
        if not self._spares and self._here[client] >= max(1 / _LIGHT_SHARE, _BURST * self._largest):
            self._looked_s = -inf  # a burst would start before the next look
        return evicted

    def leave(self, client: str, outputs: int) -> None:
        """A request has ended, in whatever way."""
        self._here[client] -= outputs
        if self._here[client] <= 0:
            del self._here[client]

    def check_early(self, asked: AdmissionRequest, room: Room, now_s: float) -> None:
        """Before anything is done for a request: `asked` says the least that it can want.

        Raises:
            Overloaded: whatever it turns out to be, `offer` would refuse it.
        """
        if asked.deadline_s is not None and asked.deadline_s <= now_s:
            return
        self._seen[asked.client] = now_s
        if self._may_start(asked, room, now_s) and (not self._waiting or self._overtakes(asked)):
            return
        self._check(asked, room, now_s)

    def offer(self, asked: AdmissionRequest, room: Room, now_s: float) -> bool:
        """True: it starts now. False: it waits, until `take` names it or `withdraw` removes it.

        Raises:
            Overloaded: it would wait too long, or not be finished in time.
        """
        if asked.deadline_s is not None and asked.deadline_s <= now_s:
            return True  # to its own error
        cost = self.pace.cost(asked)
        if not self._waiting and self._may_start(asked, room, now_s):
            self._standing.look(now_s, waiting=False)
            return True
        if self._overtakes(asked) and self._may_start(asked, room, now_s):
            self._queue.charge(asked.client, cost)
            self._charged[asked.key] = cost
            return True
        self._check(asked, room, now_s)
        self._queue.push(Waiting(asked.key, asked.client, cost, asked.priority))
        self._waiting[asked.key] = asked
        self._rate.waits(now_s)
        return False

    def withdraw(self, key: int, now_s: float) -> None:
        """A waiting request's client has left. No effect on others."""
        self._forget(key, now_s)

    def take(self, room: Room, now_s: float) -> int | None:
        """The waiting request that starts now, if any. Call it again with the room that this one leaves."""
        first = self._queue.first
        if first is None:
            return None
        if not self._may_start(self._waiting[first.key], room, now_s):
            # Streams are few so that light clients' are fast, which is no reason to let these wait.
            heads = self._queue.heads() if self._spares else []
            light = [head for head in heads if head is not first and self.is_light(head.client)]
            able = [head for head in light if self._may_start(self._waiting[head.key], room, now_s)]
            if not able:
                return None
            first = able[0]
        asked = self._waiting[first.key]
        self._queue.serve(first.key)
        self._charged[first.key] = first.cost
        self._rate.started(first.cost, now_s)
        self._standing.waited(now_s - asked.arrived_s, now_s)
        self._forget(first.key, now_s)
        return first.key

    def shed(self, room: Room, now_s: float) -> list[AdmissionRefusal]:
        """Removes the waiting requests that have waited too long, or can no longer be finished in time."""
        refused = []
        first_s, token_s = self.pace.times_s(room, now_s)
        for key, asked in list(self._waiting.items()):
            late = self._late(asked, room, now_s) > 0
            if asked.deadline_s is not None and not late:
                service_s = first_s + asked.prompt_tokens * room.prompt_token_s
                service_s += token_s * self.pace.expected_tokens(asked)
                late = now_s + service_s > asked.deadline_s
            if late or self._stands_in_the_way(asked, room, now_s):
                refused.append(self._refuse_waiting(key, Reason.SHED, self._error("it can no longer be in time", 1.0)))
            elif now_s - asked.arrived_s >= self._queue_s:
                error = self._error(f"no room within {self._queue_s:g} s", 1.0)
                refused.append(self._refuse_waiting(key, Reason.QUEUE, error))
        for each in refused:
            self._forget(each.key, now_s)
        return refused

    def settle(self, asked: AdmissionRequest, tokens: int) -> None:
        """A request has ended with so many tokens in all: its client pays for these. What started without waiting is
        free."""
        charged = self._charged.pop(asked.key, None)
        if charged is not None:
            self._queue.charge(asked.client, _cost(asked, tokens) - charged)

    # ----

    def _may_exceed(self, client: str, outputs: int, here: int) -> bool:
        """A client with little here may exceed the limit a little: others' silent streams do not keep it out."""
        share = self._most // (2 * (len(self._here) + 1))
        others = len(self._here) > (client in self._here)
        return others and self._here[client] + outputs <= share and here + outputs <= self._most + self._most // 4

    def _gives_way(self, victim: str, *, to: str, outputs: int, over: int) -> bool:
        """Whether a client that has more here than `to` has enough waiting."""
        if victim == to or self._here[victim] <= self._here[to] + outputs:
            return False
        return sum(asked.outputs for asked in self._waiting.values() if asked.client == victim) >= over

    def _may_start(self, asked: AdmissionRequest, room: Room, now_s: float) -> bool:
        self._look_at_clients(now_s)
        if not self._has_room(asked, room):
            return False
        return room.is_light or self._in_time(asked, room, now_s, _SERVICE_SHARE)

    def _overtakes(self, asked: AdmissionRequest) -> bool:
        """Whether those that wait do so only for the sake of light clients, of which this one is."""
        if not self._spares or asked.priority > 0 or self._queue.num_waiting(asked.client):
            return False
        return self.is_light(asked.client)

    def _has_room(self, asked: AdmissionRequest, room: Room) -> bool:
        shared = self._spares and not self.is_light(asked.client)
        most = self.streams.most(room) if shared else inf
        return room.has(asked.prompt_tokens, asked.outputs, shared=shared, most=most)

    def _in_time(self, asked: AdmissionRequest, room: Room, now_s: float, share: float) -> bool:
        """Whether the predicted service takes at most that part of the time until the deadline."""
        if asked.deadline_s is None:
            return True
        return self.pace.service_s(asked, room, now_s) <= share * (asked.deadline_s - now_s)

    def _stands_in_the_way(self, asked: AdmissionRequest, room: Room, now_s: float) -> bool:
        """Whether there is room for it, and it does not start only because of its deadline: time makes that no better,
        and others wait behind it."""
        if room.is_light or self._in_time(asked, room, now_s, _SERVICE_SHARE):
            return False
        return self._has_room(asked, room)

    def _late(self, asked: AdmissionRequest, room: Room, now_s: float) -> float:
        """By how much its first token would be late if it started now; not above 0: it would not."""
        if asked.first_due_s is None:
            return -inf
        return now_s + self.pace.first_s(now_s) + asked.prompt_tokens * room.prompt_token_s - asked.first_due_s

    def _check(self, asked: AdmissionRequest, room: Room, now_s: float) -> None:
        """Raises Overloaded where a request should not even wait."""
        rate = self._rate.at(now_s)
        before = self._queue.cost_before(asked.client, asked.priority)
        wait_s = 0.0 if rate is None else before / rate
        self._standing.look(now_s)
        most_s = (_TARGET_SHARE if self._standing.stands else 1.0) * self._queue_s
        reason = Reason.QUEUE
        if asked.deadline_s is not None:
            spare_s = asked.deadline_s - now_s - self.pace.service_s(asked, room, now_s)
            if spare_s < 0:
                self.counts[Reason.DEADLINE] += 1
                raise self._error(
                    f"it would take {_shown(asked.deadline_s - now_s - spare_s)} and has "
                    f"{_shown(asked.deadline_s - now_s)}",
                    max(wait_s, -spare_s),
                )
            if _WAIT_SHARE * spare_s < most_s:
                most_s, reason = _WAIT_SHARE * spare_s, Reason.DEADLINE
        late_s = self._late(asked, room, now_s) + wait_s
        if late_s > 0:
            self.counts[Reason.DEADLINE] += 1
            raise self._error("the first token cannot come before it is due", late_s)
        if wait_s > most_s or self._queue_s <= 0:
            self.counts[reason] += 1
            raise self._error(f"it would wait {_shown(wait_s)}", wait_s - most_s)

    def _refuse_waiting(self, key: int, reason: Reason, error: Overloaded) -> AdmissionRefusal:
        self.counts[reason] += 1
        self._queue.remove(key)
        self._waiting.pop(key, None)
        return AdmissionRefusal(key, reason, error)

    def _forget(self, key: int, now_s: float) -> None:
        self._queue.remove(key)
        self._waiting.pop(key, None)
        if not self._waiting:
            self._rate.rests(now_s)

    def _full(self, here: int) -> Overloaded:
        cure = "try again later, or raise BATON_MAX_CONCURRENT_REQUESTS"
        return Overloaded(f"{here} requests are running already, of at most {self._most}", cure=cure, retry_after_s=1.0)

    def _error(self, why: str, after_s: float) -> Overloaded:
        hint_s = min(_HINT_MOST_S, max(_HINT_LEAST_S, after_s))
        cure = "try again later, or allow it more time"
        return Overloaded(f"too many requests are here: {why}", cure=cure, retry_after_s=hint_s)


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s"
