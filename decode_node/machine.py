"""The decode node's side of every hand-over: events in, commands out. Pure: no clock, task, socket or tensor.

One `DecodeMachine` per process: it finds the request that an event is about, and queues requests that wait for blocks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import assert_never

from baton.core.errors import BatonError, Draining, InvalidRequest, NoNode
from baton.core.pools import blocks_for
from baton.engine.events import StepEvents
from baton.engine.request import EngineRequest
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.rpc.error_detail import from_detail, to_detail
from decode_node.admission import BlockQueue
from decode_node.commands import Admit, Command, EndSession, OpenLease, Prefetch, PrefillHere, Send
from decode_node.decode_task import DecodePhase, DecodeTask
from decode_node.events import (
    Aborted,
    Admitted,
    Closing,
    DrainStarted,
    EngineRefused,
    Event,
    HandOverReceived,
    LeaseClosed,
    LeaseFailed,
    LeaseFilled,
    LeaseOpened,
    PeerLost,
    Prefetched,
    QuietReceived,
    Reserved,
    RoomFreed,
    SegmentRefused,
    SessionClosed,
    SessionMessage,
    SessionOpened,
    StepDone,
    TimePassed,
)
from decode_node.lease_events import Filled, HandedOver, LeaseEvent, LeaseLost, LocalPrefill, Renewal, handed_over
from decode_node.local_prefill import requested_local_reason
from decode_node.rules import DecodeRules
from decode_node.step_messages import StepMessages
from decode_node.submitted import engine_request, placement_name
from decode_node.task_times import Deadlines

# Requests that prefetch at a time; further ones compute what the cache lacks.
_PREFETCHES_MAX = 64


class DecodeMachine:
    """All requests of one decode node.

    Args:
        lease_numbers: each is drawn once.

    Attributes:
        messages_refused: number of prefill nodes' messages about leases that another node fills.
    """

    def __init__(self, rules: DecodeRules, lease_numbers: Iterator[int]) -> None:
        self.rules = rules
        self._sessions: set[int] = set()
        self._by_key: dict[tuple[int, int], DecodeTask] = {}
        self._by_engine_id: dict[str, DecodeTask] = {}
        self._by_lease: dict[int, DecodeTask] = {}
        self._lease_numbers = lease_numbers
        self.messages_refused = 0
        self._queue = BlockQueue(waiting_max=rules.waiting_max)
        self._prefetching: dict[str, EngineRequest] = {}  # by engine id; they are not in the queue yet
        self._deadlines = Deadlines()
        self._step_messages = StepMessages()
        self._draining = False
        self._closing = False

    @property
    def deadline_s(self) -> float | None:
        """When `TimePassed` is due. Returns None if no timer runs."""
        return self._deadlines.first_s

    @property
    def busy(self) -> bool:
        """Whether any request is live."""
        return bool(self._by_key)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for blocks."""
        return len(self._queue)

    def waiting_blocks(self) -> list[int]:
        """Number of blocks that each waiting request needs."""
        waiting = (self._by_engine_id[engine_id] for engine_id in self._queue)
        return [blocks_for(task.num_tokens + 1, self.rules.block_size) for task in waiting]

    def task_of(self, engine_id: str) -> DecodeTask | None:
        """The request with this id in the engine, unless it has ended."""
        return self._by_engine_id.get(engine_id)

    def task(self, session: int, key: int) -> DecodeTask | None:
        """The request with this key, unless it has ended."""
        return self._by_key.get((session, key))

    @property
    def leases(self) -> dict[str, int]:
        """Number of leases by state."""
        phases = Counter(task.phase for task in self._by_lease.values())
        return {
            phase.name.lower(): phases[phase]
            for phase in (DecodePhase.OPENING, DecodePhase.FILLING, DecodePhase.CLOSING)
        }

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Reacts to one event. `now_s` never decreases."""
        match event:
            case StepDone(events=events):
                return self._step_done(events, now_s)
            case SessionOpened(session=session):
                self._sessions.add(session)
                return []
            case SessionMessage(session=session, message=message):
                return self._session_message(session, message, now_s)
            case SessionClosed(session=session):
                self._sessions.discard(session)
                self._step_messages.session_closed(session)
                return self._cancel(task for task in self._by_key.values() if task.session == session)
            case HandOverReceived(message=hand_over, incarnation=incarnation, has_draft=has_draft):
                return self._peer_report(incarnation, handed_over(hand_over, has_draft=has_draft), now_s)
            case QuietReceived(message=quiet, incarnation=incarnation):
                if not quiet.HasField("error"):
                    return []
                return self._peer_report(incarnation, LeaseLost(quiet.lease, from_detail(quiet.error)), now_s)
            case PeerLost(name=name, leases=leases):
                lost = [LeaseLost(lease, NoNode(f"{name} is gone")) for lease in leases]
                return [command for each in lost for command in self._lease_event(each, now_s)]
            case SegmentRefused(lease=lease, error=error):
                return self._lease_event(LeaseLost(lease, error), now_s)
            case LeaseFilled(totals=totals):
                return self._lease_event(Filled(totals.number), now_s)
            case LeaseOpened(lease=lease):
                return self._for_lease(lease, lambda task: task.lease_opened(now_s))
            case LeaseClosed(totals=totals):
                return self._for_lease(totals.number, lambda task: task.lease_closed(totals, now_s))
            case LeaseFailed(lease=lease, error=error):
                return self._for_lease(lease, lambda task: task.lease_failed(error))
            case Prefetched():
                return self._prefetched(event, now_s)
            case Reserved(engine_id=engine_id, reservation=reservation):
                return self._for_request(engine_id, lambda task: task.reserved(reservation, now_s))
            case EngineRefused(engine_id=engine_id, error=error):
                return self._for_request(engine_id, lambda task: task.refused(error))
            case Admitted(engine_id=engine_id, finish_reason=finish_reason):
                return self._for_request(engine_id, lambda task: task.admitted(finish_reason))
            case Aborted(engine_id=engine_id):
                return [*self._for_request(engine_id, DecodeTask.aborted), *self._reserve_first()]
            case RoomFreed():
                return self._reserve_first()
            case TimePassed():
                return self._time_passed(now_s)
            case DrainStarted():
                self._draining = True
                return []
            case Closing():
                self._draining = self._closing = True
                return [*self._cancel(self._by_key.values()), *self._end_sessions()]
        assert_never(event)

    # ---- from gateways

    def _session_message(self, session: int, message: pb.SessionRequest, now_s: float) -> list[Command]:
        match message.WhichOneof("message"):
            case "submit":
                return self._submit(session, message.submit, now_s)
            case "renew":
                renew = message.renew
                renewal = Renewal(renew.failed_lease, tuple(renew.output_token_ids), renew.prefill_incarnation)
                return self._for_key(session, renew.key, lambda task: task.lease_event(renewal, now_s))
            case "here":
                here = message.here
                local = LocalPrefill(here.failed_lease, tuple(here.output_token_ids))
                return self._for_key(session, here.key, lambda task: task.lease_event(local, now_s))
            case "cancel":
                return self._for_key(session, message.cancel.key, DecodeTask.cancel)
        return []

    def _submit(self, session: int, submit: pb.SubmitRequest, now_s: float) -> list[Command]:
        try:
            request = self._new_request(session, submit, now_s)
            prefetches = self.rules.prefetches and len(self._prefetching) < _PREFETCHES_MAX
            if not prefetches:
                self._queue.enter(request, max_queue_s=submit.max_queue_s, now_s=now_s)
        except BatonError as error:
            failed = pb.SessionResponse(failed=pb.Failed(key=submit.key, error=to_detail(error)))
            released = pb.SessionResponse(released=pb.Released(key=submit.key))
            return [Send(session, failed), Send(session, released)]
        task = DecodeTask(session, submit, request, rules=self.rules, lease_numbers=self._lease_numbers, now_s=now_s)
        self._by_key[session, submit.key] = self._by_engine_id[task.engine_id] = task
        if prefetches:
            self._prefetching[task.engine_id] = request
            return self._update_tables(task, [Prefetch(request)])
        return self._entered(task)

    def _prefetched(self, event: Prefetched, now_s: float) -> list[Command]:
        """Queues a request for blocks, now that the cache has what stores had of it."""
        request, task = self._prefetching.pop(event.engine_id, None), self._by_engine_id.get(event.engine_id)
        if request is None or task is None or task.phase is not DecodePhase.WAITING:
            return []
        task.loaded = event.loaded
        try:
            self._queue.enter(request, max_queue_s=task.times.max_queue_s, now_s=now_s)
        except BatonError as error:
            return self._update_tables(task, task.fail(error))
        return self._entered(task)

    def _entered(self, task: DecodeTask) -> list[Command]:
        """Reserves blocks for a request that has just been queued, if it is first."""
        return self._update_tables(task, self._reserve_first() if self._queue.first == task.engine_id else [])

    def _new_request(self, session: int, submit: pb.SubmitRequest, now_s: float) -> EngineRequest:
        """The engine's request for a gateway's message.

        Raises:
            Draining: this node takes no new request, or it has become a prefill node and its gateway does not know yet.
            InvalidRequest: the key is in use, a sampling parameter is out of range, or the prompt's KV would have to
                come from elsewhere to a node that gives no leases.
        """
        if self._draining:
            raise Draining(f"{self.rules.name} is draining", cure="send the request to another decode node")
        if (session, submit.key) in self._by_key:
            raise InvalidRequest(f"request {submit.key} already exists", field="key", value=submit.key)
        if not self.rules.gives_leases and not requested_local_reason(submit):
            refusal = InvalidRequest if submit.to_prefill_node else Draining
            raise refusal(
                f"{self.rules.name} is a prefill node, which decodes only requests whose prompt it computes itself",
                field="placement",
                value=placement_name(submit.placement),
                allowed=(pb.Placement.Name(pb.PLACEMENT_LOCAL),),
                cure="send a request that needs a hand-over to a decode node",
            )
        return engine_request(f"{session}.{submit.key}", submit, now_s)

    def _cancel(self, tasks: Iterable[DecodeTask]) -> list[Command]:
        # The latest first: blocks are then not reserved for a request that is cancelled next.
        return [command for task in reversed(list(tasks)) for command in self._update_tables(task, task.cancel())]

    # ---- from the engine

    def _step_done(self, events: StepEvents, now_s: float) -> list[Command]:
        """Sends each session its tokens of the step in one message; then ends finished and failed requests."""
        tasks = self._by_engine_id
        for started in events.started:
            if (task := tasks.get(started.request_id)) is not None:
                task.prefill_queue_s = started.queue_s
        for chunk in events.chunks:
            if (task := tasks.get(chunk.request_id)) is not None:
                task.chunk_computed(chunk, now_s)
        messages, finished = self._step_messages.of(events, tasks, now_s)
        commands: list[Command] = [Send(session, message) for session, message in messages.items()]
        for task in finished:
            commands += self._update_tables(task, task.finished())
        for failed in events.failed:
            if (task := tasks.get(failed.request_id)) is not None:
                commands += self._update_tables(task, task.engine_failed(failed.error))
        return commands

    # ---- time

    def _time_passed(self, now_s: float) -> list[Command]:
        return [
            command
            for engine_id in reversed(self._deadlines.due(now_s))
            for command in self._for_request(engine_id, lambda task: task.time_passed(now_s))
        ]

    # ---- tables

    def _for_key(self, session: int, key: int, react: Callable[[DecodeTask], list[Command]]) -> list[Command]:
        task = self._by_key.get((session, key))
        return [] if task is None else self._update_tables(task, react(task))

    def _for_request(self, engine_id: str, react: Callable[[DecodeTask], list[Command]]) -> list[Command]:
        task = self._by_engine_id.get(engine_id)
        return [] if task is None else self._update_tables(task, react(task))

    def _for_lease(self, lease: int, react: Callable[[DecodeTask], list[Command]]) -> list[Command]:
        task = self._by_lease.get(lease)
        if task is None:
            return []
        commands = react(task)
        if task.lease != lease:
            del self._by_lease[lease]
        return self._update_tables(task, commands)

    def _lease_event(self, event: LeaseEvent, now_s: float) -> list[Command]:
        return self._for_lease(event.lease, lambda task: task.lease_event(event, now_s))

    def _peer_report(self, incarnation: int, event: HandedOver | LeaseLost, now_s: float) -> list[Command]:
        """Reacts to a prefill node's report, unless the lease's ticket is for another node."""
        task = self._by_lease.get(event.lease)
        if task is not None and task.prefill_incarnation not in (0, incarnation):
            self.messages_refused += 1
            return []
        return self._lease_event(event, now_s)

    def _update_tables(self, task: DecodeTask, commands: list[Command]) -> list[Command]:
        """Updates the tables after a request has reacted to an event; returns the commands, with those that follow."""
        for command in commands:
            if isinstance(command, OpenLease):
                self._by_lease[command.grant.number] = task
        self._deadlines.set(task.engine_id, task.deadline_s)
        if task.phase is DecodePhase.OVER:
            del self._by_key[task.session, task.key]
            del self._by_engine_id[task.engine_id]
            self._prefetching.pop(task.engine_id, None)
            return [*commands, *self._end_sessions()]
        turn_is_over = task.phase is not DecodePhase.WAITING and self._queue.leave(task.engine_id)
        # The engine reserves for a limited number of requests, until they have their KV.
        if turn_is_over or any(isinstance(command, Admit | PrefillHere) for command in commands):
            return [*commands, *self._reserve_first()]
        return commands

    def _reserve_first(self) -> list[Command]:
        """Reserves blocks for the first waiting request."""
        return [] if self._queue.first is None else self._by_engine_id[self._queue.first].reserve()

    def _end_sessions(self) -> list[Command]:
        """Ends every stream if the process is ending and no request is left."""
        if not self._closing or self._by_key:
            return []
        sessions, self._sessions = sorted(self._sessions), set()
        return [EndSession(session) for session in sessions]
