"""Runs the machine of one request: delivers events, executes commands, and keeps the machine's timer.

Events collect while a message to a slow client waits, and then reach the machine together. Tokens also collect until
the write scheduler gives the stream its turn (`baton.gateway.request.write_scheduler`).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic

from baton.core.errors import BatonError, Draining
from baton.gateway.core.events import (
    ClientCancelled,
    DecodeReplied,
    DecodeReply,
    Event,
    FleetChanged,
    PrefillEnded,
    PrefillReplied,
    SessionLost,
    Started,
    TimePassed,
    TokensCame,
)
from baton.gateway.core.request import Request, deadline_exceeded
from baton.gateway.request.commands import (
    AskDecode,
    CallPrefill,
    CancelPrefill,
    Command,
    Finish,
    LeaveDecode,
    LoseNode,
    Respond,
    SubmitToDecode,
)
from baton.gateway.request.connections import Connections
from baton.gateway.request.decode_session import DecodeSession, TokenReceiver
from baton.gateway.request.journal import Journal
from baton.gateway.request.machine import RequestMachine
from baton.gateway.request.prefill_stream import PrefillStream
from baton.gateway.request.waiting_for_nodes import WaitingForNodes
from baton.gateway.request.write_scheduler import SLOW_S, WriteScheduler
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import generation_pb2, node_status_pb2

_GONE = "it has changed its role, or is no longer listed"

Write = Callable[[generation_pb2.GenerateResponse], Awaitable[object]]
OnMerged = Callable[[int, bool], object]
"""Gets the number of tokens that share a message with an earlier one, and whether they waited for the client."""


class RequestDriver:
    """One request in the current task, from `run` to its return. Cancel the task to cancel the request."""

    def __init__(
        self,
        request: Request,
        machine: RequestMachine,
        connections: Connections,
        waiting: WaitingForNodes,
        scheduler: WriteScheduler,
        write: Write,
        journal: Journal,
        on_merged: OnMerged,
    ) -> None:
        self._request = request
        self._journal = journal
        self._machine = machine
        self._connections = connections
        self._waiting = waiting
        self._write_to_client = write
        self._on_merged = on_merged
        self._loop = asyncio.get_running_loop()
        self._scheduler = scheduler
        self._events: list[Event] = []
        self._tokens: list[decode_pb2.StepToken] | None = None  # of the last event, if tokens may still join it
        self._joined = 0  # tokens that joined those of an event
        self._urgent = False  # whether an event must not wait for a turn
        self._waiter: asyncio.Future[None] | None = None  # set while `run` waits for an event, and perhaps for its turn
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf  # cheaper than asking the handle
        self._task: asyncio.Task[object] | None = None  # the task that executes `run`
        self._round = 0  # round of the last turn
        self._writing = False  # whether a message to the client is being written
        self._slow = False  # whether the last message had to wait for the client while others waited for a turn
        self._behind_client = False  # whether events came while the last message had to wait for the client
        self._ended_by: BatonError | None = None  # set by `end` during a write
        self._listening = False
        self._attempt: tuple[DecodeSession, int] | None = None  # the session and the request's key
        self._call: PrefillStream | None = None

    async def run(self) -> None:
        """Serves the request to its end.

        Raises:
            BatonError: the reason why the request cannot be finished.
        """
        self._task = asyncio.current_task()
        machine, write, loop, scheduler = self._machine, self._write_to_client, self._loop, self._scheduler
        self._events.append(Started())
        try:
            while True:
                if self._joined:
                    self._on_merged(self._joined, self._behind_client)
                    self._joined = 0
                events, self._events, self._tokens, self._urgent = self._events, [], None, False
                now_s = monotonic()  # finer than uvloop's clock of milliseconds
                commands = machine.handle(events, now_s)
                if machine.waits_for_fleet is not self._listening:
                    self._listen(listening=machine.waits_for_fleet)
                for command in commands:
                    if isinstance(command, Respond):
                        if self._timer is None:  # the timer has just fired; a write to a stuck client needs a deadline
                            self._set_timer(self._request.deadline_s)
                        self._writing = True
                        period = scheduler.begin(slow=self._slow)
                        try:
                            await write(command.message)
                        finally:
                            self._slow = scheduler.end(period)
                        self._writing = False
                        self._behind_client = bool(self._events) and monotonic() - now_s > SLOW_S
                    elif isinstance(command, Finish):
                        if command.error is not None:
                            raise command.error
                        await self._last_turn()
                        return
                    else:
                        self._execute(command)
                if not self._urgent:
                    self._set_timer(machine.deadline_s)
                    self._waiter = waiter = loop.create_future()
                    if self._events:
                        scheduler.ask(waiter, self._round)
                    await waiter
                    self._round = scheduler.round
                    self._waiter = None
        except asyncio.CancelledError:
            if self._ended_by is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._ended_by from None
        finally:
            self._close()

    async def _last_turn(self) -> None:
        """Waits for one more turn. Ending a request takes longer than a message, so other streams' tokens go first."""
        waiter = self._loop.create_future()
        self._scheduler.ask(waiter, self._round)
        await waiter

    def end(self, error: BatonError) -> None:
        """Ends the request with this error, even while a write to its client blocks."""
        if not self._writing:
            self._put(ClientCancelled(error))
        elif self._ended_by is None:
            assert self._task is not None
            self._ended_by = error
            self._task.cancel()

    # ---- commands

    def _execute(self, command: Command) -> None:
        self._journal.command(monotonic(), command)
        match command:
            case SubmitToDecode(attempt, role, address, request):
                client = self._connections.client(role, address)
                if client is None:
                    self._put(SessionLost(attempt, _GONE))
                    return
                session = client.session()
                self._tokens = None
                receiver = TokenReceiver(
                    partial(self._token_came, attempt),
                    partial(self._decode_replied, attempt),
                    partial(self._session_lost, attempt),
                )
                self._attempt = session, session.submit(request, receiver)
            case AskDecode(_, message):
                assert self._attempt is not None
                session, key = self._attempt
                session.ask(key, message)
            case LeaveDecode(_, cancel):
                self._leave(cancel=cancel)
            case CallPrefill(call, address, request, timeout_s, node):
                client = self._connections.client(node_status_pb2.ROLE_PREFILL, address)
                if client is None:
                    self._put(PrefillEnded(call, Draining(f"{node}: {_GONE}", cure="another node is tried")))
                    return
                self._call = client.prefill(
                    request,
                    timeout_s=timeout_s,
                    on_event=partial(self._prefill_replied, call),
                    on_end=partial(self._prefill_ended, call),
                )
            case CancelPrefill():
                self._cancel_call()
            case LoseNode(role, address, reason):
                self._connections.lose(role, address, reason)

    def _leave(self, *, cancel: bool) -> None:
        if self._attempt is not None:
            session, key = self._attempt
            session.leave(key, cancel=cancel)
        self._attempt = None

    def _cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = None

    def _close(self) -> None:
        """Ends the attempt and the call that a cancelled or failed task has left open."""
        if self._timer is not None:
            self._timer.cancel()
        self._listen(listening=False)
        self._cancel_call()
        self._leave(cancel=True)

    # ---- events

    def _put(self, event: Event) -> None:
        self._journal.event(monotonic(), event)
        self._events.append(event)
        self._tokens, self._urgent = None, True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _token_came(self, attempt: int, step_token: decode_pb2.StepToken) -> None:
        if self._tokens is not None:
            self._tokens.append(step_token)
            self._joined += 1
            return
        self._tokens = [step_token]
        if self._waiter is not None and not self._events:
            self._scheduler.ask(self._waiter, self._round)
        self._events.append(TokensCame(attempt, self._tokens, monotonic()))

    def _decode_replied(self, attempt: int, message: DecodeReply) -> None:
        self._put(DecodeReplied(attempt, message))

    def _session_lost(self, attempt: int, reason: str) -> None:
        self._put(SessionLost(attempt, reason))

    def _prefill_replied(self, call: int, event: prefill_pb2.PrefillEvent) -> None:
        self._put(PrefillReplied(call, event))

    def _prefill_ended(self, call: int, error: BatonError | None) -> None:
        self._put(PrefillEnded(call, error))

    def _fleet_changed(self) -> None:
        self._put(FleetChanged())

    def _listen(self, *, listening: bool) -> None:
        """Starts or stops receiving `FleetChanged`."""
        self._listening = listening
        if not listening:
            self._waiting.discard(self._fleet_changed)
            self._connections.remove_listener(self._fleet_changed)
        elif self._machine.is_new:
            self._waiting.add(self._request, self._fleet_changed)
        else:
            self._connections.add_listener(self._fleet_changed)

    # ---- time

    def _set_timer(self, at_s: float | None) -> None:
        # NOTE: a timer is only replaced by an earlier one. Replacing it with every token would cost more than all other
        # work for that token. If it fires too early, the machine returns the next time.
        if at_s is None or self._timer_at_s <= at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at_s = self._loop.call_at(at_s, self._timer_fired), at_s

    def _timer_fired(self) -> None:
        self._timer, self._timer_at_s = None, math.inf
        if not self._writing:
            self._put(TimePassed())
        elif monotonic() < self._request.deadline_s:  # a slow client must not make a node count as silent
            self._set_timer(self._request.deadline_s)
        else:
            self.end(deadline_exceeded(self._request.timeout_s, self._machine.failures))
