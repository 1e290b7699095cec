"""The Decode service of one node: the shell around the real `DecodeMachine`, with the sessions of gateways."""

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial

from baton.core.errors import BatonError
from baton.protos.internal.v1 import decode_pb2 as pb
from decode_node import commands as c
from decode_node import events as e
from decode_node.local_prefill import UNKNOWN, local_prefill_reason
from decode_node.machine import DecodeMachine
from decode_node.rules import DecodeRules
from tests.simulation.clock import Timer
from tests.simulation.invariants import violated
from tests.simulation.network import OnEnd, OnMessage, Stream
from tests.simulation.node import Node

OfLeases = c.OpenLease | c.CloseLease | c.SendLeaseEnded


class DecodeSide:
    """All requests that a node decodes.

    Args:
        on_lease: executes commands about leases; None: the node gives none.
        check_blocks: called with the engine's id of a request whose blocks attention will read from now on.
    """

    def __init__(
        self, node: Node, *, on_lease: Callable[[OfLeases], None] | None, check_blocks: Callable[[str], None]
    ) -> None:
        scenario, name, block_size = node.world.scenario, node.life.address, node.info.cache_shape.block_size
        self.machine = DecodeMachine(
            DecodeRules(
                name=name,
                address=name,
                incarnation=node.life.incarnation,
                lease_secret=b"a secret of tests",
                lease_s=scenario.lease_s,
                why_local=partial(local_prefill_reason, scenario.local_prefill_tokens, streams=UNKNOWN),
                waiting_max=scenario.waiting_max,
                block_size=block_size,
                gives_leases=on_lease is not None,
                prefetches=scenario.prefetch_s > 0,
            ),
            itertools.count(1),
        )
        self._node = node
        self._on_lease = on_lease
        self._check_blocks = check_blocks
        self._timer = Timer(node.world.clock, node.life.run, lambda: self.machine.deadline_s, self._time_passed)
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Stream] = {}
        self._answers: deque[e.Event] = deque()

    # ---- the machine

    def handle(self, event: e.Event) -> None:
        """Delivers an event and executes the machine's commands; the engine's answers come before all other events."""
        self._answers.append(event)
        while self._answers:
            event = self._answers.popleft()
            commands = self.machine.handle(event, self._node.world.clock.now_s)
            self._node.world.trace.handled(self._node.life.address, [event], commands)
            for command in commands:
                self._execute(command)
        self._node.changed()
        self._timer.arm()

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.Send(session, message):
                if stream := self._sessions.get(session):
                    stream.to_client(message)
            case c.EndSession(session):
                if stream := self._sessions.pop(session, None):
                    stream.finish(None)
            case c.Abort(engine_id):
                self._node.device.abort(engine_id, partial(self.handle, e.Aborted(engine_id)))
            case c.OpenLease() | c.CloseLease() | c.SendLeaseEnded():
                if self._on_lease is None:
                    violated("I3", f"{self._node.life.address} receives no KV, and has a lease: {command}")
                self._on_lease(command)
            case c.Prefetch(request):
                prefetched = e.Prefetched(request.request_id)
                self._node.life.after(self._node.world.scenario.prefetch_s, partial(self.handle, prefetched))
            case _:
                answer = self._ask_engine(command)
                if answer is not None:
                    self._answers.append(answer)

    def _ask_engine(self, command: c.Reserve | c.ExtendReserved | c.PrefillHere | c.Admit) -> e.Event | None:
        engine_id = command.request.request_id if isinstance(command, c.Reserve) else command.engine_id
        device, now_s = self._node.device, self._node.world.clock.now_s
        try:
            match command:
                case c.Reserve(request):
                    return e.Reserved(engine_id, device.reserve(request, now_s))
                case c.ExtendReserved(_, output):
                    return e.Reserved(engine_id, device.extend_reserved(engine_id, output))
                case c.PrefillHere(_, output, received):
                    self._check_blocks(engine_id)
                    device.prefill_here(engine_id, output, now_s, received_tokens=received)
                    return None
                case c.Admit(_, first):
                    self._check_blocks(engine_id)
                    return e.Admitted(engine_id, device.admit(engine_id, first))
        except BatonError as error:
            return e.EngineRefused(engine_id, error)

    def leases(self) -> dict[int, int]:
        """The leases that are open, each with the incarnation of the prefill node that it is for."""
        return {lease: task.prefill_incarnation for lease, task in self.machine._by_lease.items()}

    def _time_passed(self) -> None:
        self.handle(e.TimePassed())

    # ---- sessions

    def accept(self, stream: Stream) -> tuple[OnMessage, OnEnd]:
        number = next(self._numbers)
        self._sessions[number] = stream
        self.handle(e.SessionOpened(number))
        return partial(self._session_message, number), partial(self._session_closed, number)

    def _session_message(self, number: int, message: pb.SessionRequest) -> None:
        self.handle(e.SessionMessage(number, message))

    def _session_closed(self, number: int, _: BatonError | None) -> None:
        self._sessions.pop(number, None)
        self.handle(e.SessionClosed(number))
