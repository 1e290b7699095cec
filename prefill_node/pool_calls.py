"""The Pool calls of one prefill node: their prompts in the engine, and their results so far. Pure.

Only a window of prompts is in the engine at a time, at least as much as the next two steps can compute. So a call with
thousands of short texts fills every step, and any other prompt waits for at most two steps of them. Calls take turns.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.core.errors import BatonError, Cancelled, Overloaded
from baton.engine.events import PromptPooled, RequestFailed, RequestStarted, StepEvents
from baton.engine.pooling import Vector
from baton.engine.request import EngineRequest

_STEPS_AHEAD = 2


@dataclass(frozen=True)
class SubmitPooled:
    """Compute this prompt. If the engine refuses it, `PoolCalls.refused` follows at once."""

    request: EngineRequest


@dataclass(frozen=True)
class AbortPooled:
    """End the request in the engine and free its blocks."""

    request_id: str


@dataclass(frozen=True)
class EndPoolCall:
    """End the call. `error` None: its `results` are complete."""

    call: int
    error: BatonError | None


PoolCommand = SubmitPooled | AbortPooled | EndPoolCall


@dataclass(frozen=True)
class PooledResult:
    values: Vector
    cached_tokens: int


@dataclass(eq=False)
class PoolCall:
    """One call.

    Attributes:
        results: by the index of the prompt.
        started_s: when the first engine step with one of its prompts began; None: none has begun.
    """

    number: int
    requests: Sequence[EngineRequest]
    called_s: float
    results: dict[int, PooledResult] = field(default_factory=dict)
    started_s: float | None = None
    ended_s: float = 0.0
    waiting: deque[int] = field(default_factory=deque)
    cached: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.extend(range(len(self.requests)))

    @property
    def queue_s(self) -> float:
        return (self.ended_s if self.started_s is None else self.started_s) - self.called_s

    @property
    def pool_s(self) -> float:
        return 0.0 if self.started_s is None else self.ended_s - self.started_s


@dataclass(frozen=True)
class _InEngine:
    call: PoolCall
    index: int
    submitted_s: float


class PoolCalls:
    """The table of calls.

    Args:
        step_tokens: tokens of one engine step.
        max_requests: maximum requests of one engine step.
    """

    def __init__(self, *, step_tokens: int, max_requests: int) -> None:
        self._window_tokens = _STEPS_AHEAD * step_tokens
        self._window_requests = _STEPS_AHEAD * max_requests
        self._turns: deque[PoolCall] = deque()  # calls with waiting prompts
        self._calls: dict[int, PoolCall] = {}
        self._in_engine: dict[str, _InEngine] = {}
        self._tokens = 0  # of the prompts in the engine

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    def knows(self, request_id: str) -> bool:
        """Whether this request of the engine belongs to a call."""
        return request_id in self._in_engine

    def begin(self, call: PoolCall, now_s: float) -> list[PoolCommand]:
        """Accepts a call, and assigns ids to its requests."""
        call.requests = [replace(each, request_id=f"{call.number}:{index}") for index, each in enumerate(call.requests)]
        self._calls[call.number] = call
        self._turns.append(call)
        return self._end_if_complete(call, now_s) or self.fill(now_s)

    def fill(self, now_s: float) -> list[PoolCommand]:
        """Submits prompts while the window has room, from each call in turn."""
        commands: list[PoolCommand] = []
        while self._turns:
            call = self._turns[0]
            if not call.waiting:
                self._turns.popleft()
                continue
            request = call.requests[call.waiting[0]]
            tokens = self._tokens + len(request.prompt)
            if self._in_engine and (tokens > self._window_tokens or len(self._in_engine) >= self._window_requests):
                break
            index = call.waiting.popleft()
            self._in_engine[request.request_id] = _InEngine(call, index, now_s)
            self._tokens = tokens
            self._turns.rotate(-1)
            commands.append(SubmitPooled(request))
        return commands

    def refused(self, request_id: str, error: BatonError, now_s: float) -> list[PoolCommand]:
        """Handles the engine's refusal of a prompt. One for lack of room waits for others of the call to end."""
        entry = self._leave(request_id)
        if entry is None:
            return []
        call = entry.call
        if isinstance(error, Overloaded) and any(each.call is call for each in self._in_engine.values()):
            call.waiting.appendleft(entry.index)
            if call not in self._turns:
                self._turns.append(call)
            return []
        return self.end(call.number, error, now_s)

    def step(self, events: StepEvents, now_s: float) -> list[PoolCommand]:
        """Handles the results of an engine step."""
        if not self._in_engine:
            return []
        commands: list[PoolCommand] = []
        happened: list[RequestStarted | PromptPooled | RequestFailed] = []
        happened += [*events.started, *events.pooled, *events.failed]
        for event in happened:
            commands += self._handle(event, now_s)
        return commands + self.fill(now_s)

    def end(self, call: int, error: BatonError | None, now_s: float) -> list[PoolCommand]:
        """Ends a call; has no effect on one that has ended. Its prompts leave the engine."""
        ended = self._calls.pop(call, None)
        if ended is None:
            return []
        ended.ended_s = now_s
        ended.waiting.clear()
        mine = [request_id for request_id, entry in self._in_engine.items() if entry.call is ended]
        for request_id in mine:
            self._leave(request_id)
        return [*map(AbortPooled, mine), EndPoolCall(call, error), *self.fill(now_s)]

    def end_all(self, error: BatonError, now_s: float) -> list[PoolCommand]:
        for call in self._calls.values():
            call.waiting.clear()
        return [command for call in list(self._calls) for command in self.end(call, error, now_s)]

    def cancel(self, call: int, now_s: float) -> list[PoolCommand]:
        return self.end(call, Cancelled("the gateway cancelled the call"), now_s)

    def _handle(self, event: RequestStarted | PromptPooled | RequestFailed, now_s: float) -> list[PoolCommand]:
        entry = self._in_engine.get(event.request_id)
        if entry is None:
            return []
        call = entry.call
        match event:
            case RequestStarted(queue_s=queue_s, cached_tokens=cached_tokens):
                call.cached[entry.index] = cached_tokens
                began_s = entry.submitted_s + queue_s
                call.started_s = began_s if call.started_s is None else min(call.started_s, began_s)
                return []
            case PromptPooled(values=values):
                self._leave(event.request_id)
                call.results[entry.index] = PooledResult(values, call.cached.get(entry.index, 0))
                return self._end_if_complete(call, now_s)
            case RequestFailed(error=error):
                self._leave(event.request_id)
                return self.end(call.number, error, now_s)

    def _leave(self, request_id: str) -> _InEngine | None:
        entry = self._in_engine.pop(request_id, None)
        if entry is not None:
            self._tokens -= len(entry.call.requests[entry.index].prompt)
        return entry

    def _end_if_complete(self, call: PoolCall, now_s: float) -> list[PoolCommand]:
        return self.end(call.number, None, now_s) if len(call.results) == len(call.requests) else []
