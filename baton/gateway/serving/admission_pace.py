"""Measurements for admission: service times on the nodes, how many streams they can run, and how fast the queue moves.
Pure."""

from dataclasses import dataclass
from math import inf

from baton.gateway.fleet.router import OUTPUT_TOKENS
from baton.gateway.serving.node_capacity import ClusterCapacity

_MEMORY_S = 3.0  # half-life of a measurement
_WEIGHT = 0.2  # of a new measurement
_OUTPUT_QUANTILE = 0.8  # of the requests have at most the expected number of tokens
_PROMPT_TOKENS_PER_OUTPUT = 8  # prompt tokens that cost a node about as much as one decoded token
_SLOWER = 2.0  # largest slowdown of a stream against one alone, while a client with few requests is present
_CHANGE = 1.25  # largest change of the bound per interval: streams started earlier still affect the measured times


@dataclass(frozen=True)
class AdmissionRequest:
    """A request, with what admission needs to know about it."""

    key: int
    client: str
    prompt_tokens: int
    output_tokens: int  # maximum tokens of each output
    certain_tokens: int  # fewest tokens of each output, unless a stop string ends it
    arrived_s: float
    outputs: int = 1  # number of outputs to sample
    priority: int = 0
    deadline_s: float | None = None  # when the client gives up; None: later than any wait
    first_due_s: float | None = None  # refuse the request if its first token would come later

    def cost(self, tokens: int) -> float:
        """The request's cost to the nodes, in decoded tokens, if its outputs have `tokens` tokens in total."""
        return tokens + self.outputs * self.prompt_tokens / _PROMPT_TOKENS_PER_OUTPUT


class Estimate:
    """A moving average that decays while nothing is measured, so that an old measurement cannot keep requests out for
    ever."""

    def __init__(self) -> None:
        self._value, self._at_s = 0.0, -inf

    def observe(self, value: float, now_s: float) -> None:
        fresh = now_s - self._at_s <= _MEMORY_S
        self._value += (value - self._value) * (_WEIGHT if fresh else 0.5 if self._value else 1.0)
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """The mean now; 0 if nothing was measured."""
        kept: float = 0.5 ** min(60.0, max(0.0, (now_s - self._at_s) / _MEMORY_S - 1))
        return self._value * kept


class AdmissionPace:
    """Predicts how long requests take on the nodes."""

    def __init__(self) -> None:
        self._first_s = Estimate()
        self._token_s = Estimate()
        self._slowdown = Estimate()  # measured time per token divided by the predicted one
        self._output_tokens: dict[int, float] = {}  # by the bit length of the allowed maximum

    def expected_tokens(self, asked: AdmissionRequest) -> int:
        expected = self._output_tokens.get(asked.output_tokens.bit_length(), OUTPUT_TOKENS)
        return max(asked.certain_tokens, min(asked.output_tokens, round(expected)))

    def ttft_s(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> float:
        """Predicted TTFT of a request that starts now."""
        before_s = max(self._first_s.at(now_s), capacity.prefill_wait_s)
        return before_s + asked.prompt_tokens * capacity.prompt_token_s

    def service_s(self, asked: AdmissionRequest, capacity: ClusterCapacity, now_s: float) -> float:
        """Predicted service time of a request that starts now."""
        token_s = self._token_s.at(now_s)
        if capacity.step_s is not None:
            token_s = capacity.step_s * max(1.0, self._slowdown.at(now_s))
        return self.ttft_s(asked, capacity, now_s) + self.expected_tokens(asked) * token_s

    def first_token(self, seconds: float, prompt_tokens: int, capacity: ClusterCapacity, now_s: float) -> None:
        """Records a request's TTFT, or how long it has waited without a first token."""
        self._first_s.observe(max(0.0, seconds - prompt_tokens * capacity.prompt_token_s), now_s)

    def progressed(self, token_s: float, capacity: ClusterCapacity, now_s: float) -> None:
        """Records the time per token of running streams: it shows a change of speed seconds before they end."""
        self._token_s.observe(token_s, now_s)
        if capacity.step_s:
            self._slowdown.observe(token_s / capacity.step_s, now_s)

    def ended(self, tokens: int, most: int, *, whole: bool) -> None:
        """Records the length of a finished output that was allowed `most` tokens; `whole`: it is complete."""
        size = most.bit_length()
        expected = self._output_tokens.get(size, min(OUTPUT_TOKENS, most))
        if whole or tokens > expected:
            share = _OUTPUT_QUANTILE - (tokens <= expected)
            self._output_tokens[size] = max(1.0, expected + share * max(1.0, _WEIGHT * expected / 2))


class StreamBound:
    """Limits the running streams while a client with few requests competes with one with many.

    All streams of a node share its steps, so a large client's streams slow down a small one's. Step costs do not show
    by how much: they leave out prompts in between, the host's work, and other processes on the machine. So the gateway
    measures the time per token. Its bound also counts other gateways' streams.
    """

    def __init__(self) -> None:
        self._bound: float | None = None  # None: not needed, or not measured yet
        self._alone_s: float | None = None
        self._was_alone = False

    def most(self, capacity: ClusterCapacity) -> float:
        """The bound: clients with many requests start streams only while fewer than this are running."""
        return min(capacity.most_shared, self._bound or _SLOWER * capacity.spare_requests)

    def measured(self, token_s: float, capacity: ClusterCapacity, *, spares: bool) -> None:
        """Records the streams' time per token since the last call; `spares`: streams must be kept fast now."""
        is_alone = capacity.load <= 1
        if is_alone and self._was_alone:
            known_s = self._alone_s or token_s
            self._alone_s = known_s + _WEIGHT * (token_s - known_s)
        self._was_alone = is_alone
        alone_s = self._alone_s or capacity.alone_s
        if not spares or not alone_s:
            self._bound = None
            return
        faster, bound = _SLOWER * alone_s / token_s, self.most(capacity)
        if faster < 1:
            bound = min(bound, capacity.load) * max(1 / _CHANGE, faster)
        elif faster > 1 and capacity.load >= bound / _CHANGE:
            bound = max(bound + 1, bound * min(_CHANGE, faster))
        self._bound = max(capacity.spare_requests, bound)


class StartRate:
    """The rate at which queued work starts: cost per second, measured while requests wait."""

    def __init__(self) -> None:
        self._cost = self._busy_s = 0.0
        self._at_s: float | None = None  # None: no request waits

    def waits(self, now_s: float, *, waits: bool = True) -> None:
        self._pass(now_s)
        self._at_s = now_s if waits else None

    def started(self, cost: float, now_s: float) -> None:
        self._pass(now_s)
        self._cost += cost

    def at(self, now_s: float, least_s: float) -> float | None:
        """Returns None if less than `least_s` has passed, or nothing has started."""
        self._pass(now_s)
        return self._cost / self._busy_s if self._cost and self._busy_s >= least_s else None

    def _pass(self, now_s: float) -> None:
        if self._at_s is not None:
            passed_s = max(0.0, now_s - self._at_s)
            kept = 0.5 ** (passed_s / _MEMORY_S)
            self._cost, self._busy_s, self._at_s = self._cost * kept, self._busy_s * kept + passed_s, now_s


class StandingQueue:
    """Detects a standing queue as CoDel (RFC 8289) does: the shortest wait of an interval exceeded the target, and no
    interval since then had a wait below half of it."""

    def __init__(self, target_s: float, interval_s: float) -> None:
        self.stands = False
        self._target_s, self._interval_s = target_s, interval_s
        self._shortest_s, self._ends_s = inf, -inf

    def look(self, now_s: float, *, waited_s: float = inf) -> None:
        """Updates `stands`. `waited_s`: wait of a request that starts now; infinite: none starts, 0: none waits."""
        if now_s >= self._ends_s:
            limit_s = self._target_s * (0.5 if self.stands else 1.0)
            self.stands = self._ends_s > -inf and self._shortest_s > limit_s
            self._shortest_s, self._ends_s = inf, now_s + self._interval_s
        self._shortest_s = min(self._shortest_s, waited_s)
        self.stands = self.stands and waited_s > 0
