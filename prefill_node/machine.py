"""Routes events to the Prefill calls of one node. Pure: no clock, task, socket or tensor.

`prefill_task` has the states of one call.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.core import errors
from baton.core.errors import BatonError
from baton.engine.events import StepEvents
from baton.kvcache.spec import KVCacheSpec
from prefill_node.commands import Command, EndCall
from prefill_node.events import (
    Aborted,
    BecameQuiet,
    CallCancelled,
    Called,
    Closing,
    DrainStarted,
    EngineRefused,
    Event,
    LeaseEnded,
    PeerLost,
    Prefetched,
    SendFailed,
    Sent,
    StepDone,
    StopFailed,
)
from prefill_node.prefill_task import EngineEvent, PrefillPhase, PrefillTask, TaskEvent


@dataclass(frozen=True)
class PrefillRules:
    """The node's facts that the machine needs.

    Attributes:
        name: for errors.
        spec: the model's cache for a request.
        prefetches: whether there are stores outside of the cache.
    """

    name: str
    spec: KVCacheSpec
    prefetches: bool = False


class PrefillMachine:
    """The table of calls."""

    def __init__(self, rules: PrefillRules) -> None:
        self._rules = rules
        self._tasks: dict[str, PrefillTask] = {}  # by the request's id in the engine
        self._draining = False

    @property
    def busy(self) -> bool:
        """Whether any call is live."""
        return bool(self._tasks)

    def knows(self, request_id: str) -> bool:
        """Whether this request of the engine belongs to a call."""
        return request_id in self._tasks

    def refusal(self) -> BatonError | None:
        """The reason to refuse every new call now. Returns None if new calls are admitted."""
        if self._draining:
            return errors.Draining(f"{self._rules.name} is draining", cure="send the request to another prefill node")
        return None

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Reacts to one event. `now_s` never decreases. Events of calls that have ended are ignored, as are those of
        other requests in the same engine."""
        match event:
            case Called():
                return self._start(event, now_s)
            case StepDone(events=step):
                return self._step(step, now_s)
            case Prefetched() | EngineRefused() | Sent() | SendFailed() | BecameQuiet() | StopFailed() | Aborted():
                return self._pass_on(str(event.call), event, now_s)
            case CallCancelled(call=call):
                return self._fail(errors.Cancelled("the gateway cancelled the call"), lambda task: task.call == call)
            case LeaseEnded(peer=peer, lease=lease):
                error = errors.Cancelled("the decode node took the lease back")
                # Every decode node draws its leases' numbers at random, so two nodes may draw the same one.
                return self._fail(error, lambda task: (task.peer.number, task.lease) == (peer, lease))
            case PeerLost(peer=peer, error=lost):
                return self._fail(lost, lambda task: task.peer.number == peer)
            case DrainStarted():
                self._draining = True
                return []
            case Closing():
                self._draining = True
                cure = "the gateway redoes the prefill elsewhere"
                return self._fail(errors.Draining(f"{self._rules.name} is shutting down", cure=cure), lambda _: True)

    def _start(self, called: Called, now_s: float) -> list[Command]:
        if (refusal := self.refusal()) is not None:
            return [EndCall(called.call, refusal)]
        try:
            task = PrefillTask(called, spec=self._rules.spec, now_s=now_s, prefetches=self._rules.prefetches)
        except BatonError as error:
            return [EndCall(called.call, error)]
        self._tasks[str(called.call)] = task
        return task.start()

    def _step(self, step: StepEvents, now_s: float) -> list[Command]:
        if not self._tasks:
            return []
        # Chunks and prompt logprobs come before tokens: all of them are known when the first token is sampled.
        events: list[EngineEvent] = [
            *step.layers,
            *step.started,
            *step.chunks,
            *step.scored,
            *step.drafted,
            *step.tokens,
            *step.failed,
        ]
        return [command for event in events for command in self._pass_on(event.request_id, event, now_s)]

    def _pass_on(self, request_id: str, event: TaskEvent, now_s: float) -> list[Command]:
        task = self._tasks.get(request_id)
        if task is None:
            return []
        commands = task.handle(event, now_s)
        if task.phase is PrefillPhase.ENDED:
            del self._tasks[request_id]
        return commands

    def _fail(self, error: BatonError, concerns: Callable[[PrefillTask], bool]) -> list[Command]:
        return [command for task in self._tasks.values() if concerns(task) for command in task.fail(error)]
