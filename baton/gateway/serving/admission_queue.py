"""Where requests wait for their turn: the shell around `baton.gateway.serving.admission`.

Waiting requests are looked at whenever a request ends or comes, and in short intervals, in which nodes report.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import count
from time import monotonic

from baton.core.types import LocalPolicy
from baton.gateway.core.request import Outputs, Request
from baton.gateway.core.shared_counters import Count, SharedCounters
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.router import NodeView
from baton.gateway.request.connections import Connections
from baton.gateway.request.driver import Write
from baton.gateway.request.machine import RequestMachine
from baton.gateway.serving.admission import Admission, AdmissionRefusal, AdmissionRequest, Reason
from baton.gateway.serving.node_capacity import Room, Rooms
from baton.gateway.serving.stream_limit import StreamProgress
from baton.protos.v1 import generation_pb2 as pb
from baton.settings.gateway_config import GatewaySettings

_COUNTS = {
    Reason.FULL: Count.REFUSED_FULL,
    Reason.QUEUE: Count.REFUSED_QUEUE,
    Reason.DEADLINE: Count.REFUSED_DEADLINE,
    Reason.SHED: Count.SHED,
}
_LOOK_S = 0.02
_SHED_EACH_S = 5e-5  # between two looks at all that wait, for each: these shall not take much of the process
_MEASURE_S = 0.25
# The nodes report this output, or have not yet reported the end of the one before.
_ALONE = 1
_ALONE_TOKENS = 16  # that are worth a measurement
_SEEN_S = 0.01  # with many nodes, a look at all of them costs more than a refusal should


@dataclass(eq=False)
class QueuedOutput:
    """One output that runs.

    Attributes:
        step_s: `Room.step_s` when it began.
        alone: it had the nodes for itself when it began.
        client_s: for how long its messages waited for the client, which says nothing about the nodes.
        writes: a message waits.
        seen_s, seen_tokens: when its tokens were counted last, and how many it had.
    """

    began_s: float
    step_s: float | None
    machine: RequestMachine
    alone: bool
    client_s: float = 0.0
    writes: bool = False
    seen_s: float = 0.0
    seen_tokens: int = 0

    async def write(self, write: Write, message: pb.GenerateResponse) -> None:
        began_s = monotonic()
        self.writes = True
        try:
            await write(message)
        finally:
            self.writes = False
            self.client_s += monotonic() - began_s

    def look(self, progress: StreamProgress, now_s: float) -> None:
        """Adds what it has got since the last look, unless its client reads too slowly."""
        first_s, tokens = self.machine.first_token_at_s, self.machine.new_tokens
        if first_s is None:
            return
        if self.seen_s and not self.writes:
            progress.seconds += now_s - self.seen_s
            progress.tokens += tokens - self.seen_tokens
        self.seen_s, self.seen_tokens = now_s, tokens


class AdmissionQueue:
    """One per process."""

    def __init__(self, settings: GatewaySettings, connections: Connections, board: SharedCounters) -> None:
        ttft_s = settings.slo.ttft_s
        self._admission = Admission(most=settings.max_concurrent_requests, queue_s=settings.max_queue_s)
        self._rooms = Rooms(ttft_s)
        self._elastic = settings.local_policy is LocalPolicy.ELASTIC
        self._uses_prefills = settings.local_policy is not LocalPolicy.LOCAL
        self._slo_ttft_s = ttft_s if settings.refuse_late else None
        self._refuses_late = settings.refuse_late
        self._connections = connections
        self._board = board
        self._keys = count(1)
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.Handle | None = None
        self._is_later = False  # the timer does not fire in this turn of the loop
        self._published: Counter[Reason] = Counter()
        self._num_published = 0
        self._shed_at_s = 0.0
        self._outputs: set[QueuedOutput] = set()
        self._measured_s = 0.0
        self._seen: tuple[float, Room] | None = None  # the room and when it was found; None: it has changed since

    def enter(self, client: str, outputs: int) -> None:
        """Counts a request of a client as here; `leave` must follow.

        Raises:
            Overloaded: there are too many.
        """
        here = self._board.total(Count.RUNNING)
        try:
            self._end(self._admission.enter(client, outputs, here, monotonic()))
        finally:
            self._publish()

    def leave(self, client: str, outputs: int) -> None:
        self._admission.leave(client, outputs)
        if self._waiters:
            self._look_soon()

    def check(self, message: pb.GenerateRequest, outputs: Outputs, client: str, *, deadline_s: float | None) -> None:
        """Refuses a request before its prompt is read, if that does not matter.

        Raises:
            Overloaded: it may not even wait.
        """
        if message.output_token_ids:
            return
        sampling = message.sampling
        max_tokens = max(1, min(sampling.max_tokens, self._connections.fleet.max_context_tokens))
        prompt_tokens = len(message.token_ids.ids)
        now_s = monotonic()
        asked = AdmissionRequest(
            key=0,
            client=client,
            prompt_tokens=min(prompt_tokens, message.truncate_prompt_tokens or prompt_tokens),
            output_tokens=max_tokens,
            certain_tokens=max_tokens if sampling.ignore_eos else 0,
            arrived_s=now_s,
            outputs=outputs.drawn,
            priority=message.priority,
            deadline_s=deadline_s,
        )
        try:
            self._admission.check_early(asked, self._room(now_s), now_s)
        finally:
            self._publish()

    def ask(self, request: Request, outputs: Outputs, client: str, *, has_deadline: bool) -> AdmissionRequest:
        """What the request wants."""
        sampling = request.sampling
        ttft_s = request.slo.ttft_s if request.slo.ttft_s is not None else self._slo_ttft_s
        return AdmissionRequest(
            key=next(self._keys),
            client=client,
            prompt_tokens=len(request.prompt),
            output_tokens=sampling.max_tokens,
            certain_tokens=sampling.max_tokens if sampling.ignore_eos else sampling.min_tokens,
            arrived_s=request.started_at_s,
            outputs=outputs.drawn,
            priority=request.priority,
            deadline_s=request.deadline_s if has_deadline else None,
            first_due_s=request.started_at_s + ttft_s if self._refuses_late and ttft_s is not None else None,
        )

    def offer(self, asked: AdmissionRequest) -> "asyncio.Future[None] | None":
        """The request's turn, which gets an error where the request may not run; None: it runs now. `withdraw` must
        follow.

        Raises:
            Overloaded: it may not even wait.
        """
        now_s = monotonic()
        try:
            if self._admission.offer(asked, self._room(now_s), now_s):
                self._seen = None
                return None
        finally:
            self._publish()
        waiter = self._waiters[asked.key] = asyncio.get_running_loop().create_future()
        self._board.add(Count.WAITING, asked.outputs)
        self._look_soon()
        return waiter

    def withdraw(self, asked: AdmissionRequest) -> None:
        """The request waits no longer."""
        if self._waiters.pop(asked.key, None) is not None:
            self._board.add(Count.WAITING, -asked.outputs)
        self._admission.withdraw(asked.key, monotonic())

    def begins(self, machine: RequestMachine) -> QueuedOutput:
        """An output begins to run."""
        now_s = monotonic()
        room = self._room(now_s)
        output = QueuedOutput(now_s, room.step_s, machine, room.load <= _ALONE)
        self._outputs.add(output)
        return output

    def ran(self, output: QueuedOutput, *, whole: bool, in_time: bool) -> None:
        """An output has ended."""
        self._outputs.discard(output)
        now_s, pace, machine = monotonic(), self._admission.pace, output.machine
        room, first_s = self._room(now_s), machine.first_token_at_s
        if first_s is not None:
            pace.first_token(first_s - output.began_s, machine.prompt_tokens, room, now_s)
            steps_s = [step_s for step_s in (output.step_s, room.step_s) if step_s is not None]
            seconds, tokens = max(0.0, now_s - first_s - output.client_s), machine.new_tokens
            pace.ended(tokens, machine.max_tokens, seconds, max(steps_s, default=None), now_s, whole=whole)
            if output.alone and whole and tokens >= _ALONE_TOKENS and room.load <= _ALONE:
                self._admission.streams.ended_alone(seconds / (tokens - 1))
        elif not in_time:
            pace.first_token(now_s - output.began_s, machine.prompt_tokens, room, now_s)

    def settle(self, asked: AdmissionRequest, tokens: int) -> None:
        """The request has ended after so many tokens."""
        self._admission.settle(asked, tokens)

    # ----

    def _room(self, now_s: float) -> Room:
        if self._seen is None or now_s - self._seen[0] > _SEEN_S:
            self._seen = now_s, self._look_at_nodes(now_s)
        return self._seen[1]

    def _look_at_nodes(self, now_s: float) -> Room:
        fleet = self._connections.fleet
        if not fleet.serves() and not fleet.pairs_under_way():
            return Room()  # waiting helps nobody: the choice of nodes says what is missing
        broken = fleet.breakers.open(now_s)  # they get requests only where there are no others
        prefills = _views(fleet.prefills.values(), broken, now_s) if self._uses_prefills else []
        decodes = fleet.decoding_nodes() if self._elastic else fleet.decodes.values()
        return self._rooms.of(_views(decodes, broken, now_s), prefills, elastic=self._elastic)

    def _look_soon(self) -> None:
        if self._timer is not None and self._is_later:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer, self._is_later = asyncio.get_running_loop().call_soon(self._look), False

    def _look(self) -> None:
        """Starts the next request, or gives up those that have waited too long."""
        self._timer = None
        now_s, loop = monotonic(), asyncio.get_running_loop()
        room = self._room(now_s)
        if now_s >= self._measured_s + _MEASURE_S:
            self._measure(room, now_s)
        key = self._admission.take(room, now_s)
        if key is not None:
            self._seen = None
            waiter = self._waiters.get(key)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            # The next look must know that this request was sent, by its own task, or by one that this task starts.
            self._timer, self._is_later = loop.call_soon(loop.call_soon, self._look), False
            return
        refused = []
        if now_s >= self._shed_at_s:
            self._shed_at_s = now_s + max(_LOOK_S, _SHED_EACH_S * self._admission.num_waiting)
            refused = self._admission.shed(room, now_s)
        self._end(refused)
        self._publish()
        if refused:
            self._look_soon()
        elif self._admission.num_waiting:
            self._timer, self._is_later = loop.call_later(_LOOK_S, self._look), True

    def _measure(self, room: Room, now_s: float) -> None:
        self._measured_s, progress = now_s, StreamProgress()
        for output in self._outputs:
            output.look(progress, now_s)
        self._admission.progressed(progress, room, now_s)

    def _end(self, refused: Iterable[AdmissionRefusal]) -> None:
        for each in refused:
            if (waiter := self._waiters.get(each.key)) is not None and not waiter.done():
                waiter.set_exception(each.error)

    def _publish(self) -> None:
        counts = self._admission.counts
        if (total := counts.total()) == self._num_published:
            return
        self._num_published = total
        for reason, number in counts.items():
            if number != self._published[reason]:
                self._board.add(_COUNTS[reason], number - self._published[reason])
                self._published[reason] = number


def _views(nodes: Iterable[FleetNode], broken: Set[int], now_s: float) -> list[NodeView]:
    usable = [node for node in nodes if node.open]
    usable = [node for node in usable if node.incarnation not in broken] or usable
    return [node.view().with_queue(node.queue_s(now_s)) for node in usable]
