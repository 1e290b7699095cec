"""A decode node's process: the shell around the real `DecodeMachine`."""

import itertools
from collections import deque
from functools import partial

from baton.errors import BatonError
from decode_node import commands as c
from decode_node import events as e
from decode_node.local_prefill import UNKNOWN, why_here
from decode_node.machine import DecodeMachine
from decode_node.rules import DecodeRules
from decode_node.sender_numbers import SenderNumbers
from engine.events import StepEvents
from kvtransfer.leases import LeaseTotals
from protos.baton.v1 import common_pb2
from protos.baton.v1 import decode_pb2 as pb
from tests.simulation.clock import Timer
from tests.simulation.invariants import violated
from tests.simulation.network import Life, OnEnd, OnMessage, Stream
from tests.simulation.node import Node
from tests.simulation.transfer import Receiver
from tests.simulation.world import World


class _Pair:
    """One prefill node's Pair stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.number = 0  # sender number, drawn at the hello
        self.state = common_pb2.PeerState()


class DecodeProcess(Node):
    """One life of a decode node."""

    role = common_pb2.ROLE_DECODE

    def __init__(self, world: World, life: Life) -> None:
        super().__init__(world, life, world.scenario.decode)
        self.receiver = Receiver(
            life,
            world.clock,
            world.random,
            self.device,
            successor=partial(world.receiver_at, life.address),
            on_filled=self._filled,
            on_refused=self._segment_refused,
        )
        world.receivers[life.incarnation] = self.receiver
        self.machine = DecodeMachine(
            DecodeRules(
                name=life.address,
                address=life.address,
                incarnation=life.incarnation,
                lease_s=world.scenario.lease_s,
                why_local=partial(why_here, world.scenario.local_prefill_tokens, streams=UNKNOWN),
                waiting_max=world.scenario.waiting_max,
                block_size=world.scenario.decode.block_size,
                split_unit=world.scenario.decode.block_size,
            ),
            itertools.count(1),
        )
        self._timer = Timer(world.clock, life.run, lambda: self.machine.deadline_s, self._time_passed)
        self._numbers = itertools.count(1)
        self._sender_numbers = SenderNumbers()
        self._sessions: dict[int, Stream] = {}
        self._pairs: dict[int, _Pair] = {}
        self._answers: deque[e.Event] = deque()

    # ---- the machine

    def handle(self, event: e.Event) -> None:
        """Delivers an event and executes the machine's commands; the engine's answers come before all other events."""
        self._answers.append(event)
        while self._answers:
            event = self._answers.popleft()
            commands = self.machine.handle(event, self.world.clock.now_s)
            self.world.trace.handled(self.life.address, [event], commands)
            for command in commands:
                self._execute(command)
        self.changed()
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
                self.device.abort(engine_id, partial(self.handle, e.Aborted(engine_id)))
            case c.OpenLease(grant):
                self.receiver.open(grant, partial(self.handle, e.LeaseOpened(grant.number)))
            case c.CloseLease(lease):
                self.receiver.close(lease, self._lease_closed, partial(self._lease_failed, lease))
            case c.SendLeaseEnded(lease):
                for pair in self._pairs.values():
                    pair.stream.to_client(pb.PairResponse(lease_ended=pb.LeaseEnded(lease=lease)))
            case _:
                answer = self._ask_engine(command)
                if answer is not None:
                    self._answers.append(answer)

    def _ask_engine(self, command: c.Reserve | c.ExtendReserved | c.PrefillHere | c.Admit) -> e.Event | None:
        engine_id = command.request.request_id if isinstance(command, c.Reserve) else command.engine_id
        now_s = self.world.clock.now_s
        try:
            match command:
                case c.Reserve(request):
                    return e.Reserved(engine_id, self.device.reserve(request, now_s))
                case c.ExtendReserved(_, output):
                    return e.Reserved(engine_id, self.device.extend_reserved(engine_id, output))
                case c.PrefillHere(_, output, received):
                    self.receiver.check_not_leased(self.device.blocks_of(engine_id), engine_id)
                    self.device.prefill_here(engine_id, output, now_s, received_tokens=received)
                    return None
                case c.Admit(_, first):
                    self.receiver.check_not_leased(self.device.blocks_of(engine_id), engine_id)
                    return e.Admitted(engine_id, self.device.admit(engine_id, first))
        except BatonError as error:
            return e.EngineRefused(engine_id, error)

    def _time_passed(self) -> None:
        self.handle(e.TimePassed())

    def step_done(self, events: StepEvents) -> None:
        self.handle(e.StepDone(events))

    # ---- the transfer

    def _filled(self, totals: LeaseTotals) -> None:
        self.life.after(0.0, partial(self.handle, e.LeaseFilled(totals)))

    def _segment_refused(self, lease: int, error: BatonError) -> None:
        self.life.after(0.0, partial(self.handle, e.SegmentRefused(lease, error)))

    def _lease_closed(self, totals: LeaseTotals) -> None:
        self.handle(e.LeaseClosed(totals))

    def _lease_failed(self, lease: int, error: BatonError) -> None:
        self.handle(e.LeaseFailed(lease, error))

    # ---- streams

    def accept(self, kind: str, stream: Stream) -> tuple[OnMessage, OnEnd]:
        if kind == "watch":
            return self.watch(stream)
        if kind == "session":
            number = next(self._numbers)
            self._sessions[number] = stream
            self.handle(e.SessionOpened(number))
            return partial(self._session_message, number), partial(self._session_closed, number)
        pair = _Pair(stream)
        return partial(self._pair_message, pair), partial(self._pair_ended, pair)

    def _session_message(self, number: int, message: pb.SessionRequest) -> None:
        self.handle(e.SessionMessage(number, message))

    def _session_closed(self, number: int, _: BatonError | None) -> None:
        self._sessions.pop(number, None)
        self.handle(e.SessionClosed(number))

    def _pair_message(self, pair: _Pair, message: pb.PairRequest) -> None:
        match message.WhichOneof("message"):
            case "hello":
                info = message.hello.info
                pair.number = self._sender_numbers.draw(1)
                pair.state = common_pb2.PeerState(
                    name=info.name,
                    address=info.address,
                    incarnation=info.incarnation,
                    phase=common_pb2.PEER_PHASE_READY,
                )
                self._pairs[pair.number] = pair
                self.receiver.peers.add(pair.number)
                self.changed()
                accepted = pb.PairAccepted(info=self.info, sender_number=pair.number)
                pair.stream.to_client(pb.PairResponse(accepted=accepted))
            case "hand_over":
                self.handle(e.HandOverReceived(pair.number, message.hand_over, pair.state.incarnation))
            case "quiet":
                self.handle(e.QuietReceived(pair.number, message.quiet, pair.state.incarnation))

    def _pair_ended(self, pair: _Pair, _: BatonError | None) -> None:
        if pair.number:
            del self._pairs[pair.number]
            self.life.after(0.001 * self.world.random.random(), partial(self._disconnected, pair))

    def _disconnected(self, pair: _Pair) -> None:
        leases = self.receiver.disconnect(pair.number)
        self.handle(e.PeerLost(pair.number, pair.state.name, leases))
        self._sender_numbers.give_back(pair.number)

    def peer_states(self) -> tuple[common_pb2.PeerState, ...]:
        return tuple(pair.state for pair in self._pairs.values())

    # ---- the process

    @property
    def busy(self) -> bool:
        return self.machine.busy or self.receiver.leases.open_leases > 0

    @property
    def requests_waiting(self) -> int:
        return self.device.load.requests_waiting + self.machine.waiting

    def drain(self) -> None:
        self.draining = True
        self.handle(e.Draining())

    def close(self) -> None:
        self.handle(e.Closing())

    def check(self) -> None:
        super().check()
        self.receiver.check()

    def check_idle(self) -> None:
        super().check_idle()
        if self.receiver.leases.open_leases:
            violated("I1", f"{self.life.address}: {self.receiver.leases.open_leases} leases are open")

    @property
    def paired_with(self) -> set[int]:
        """Incarnations of the prefill nodes that may send to this node."""
        return {pair.state.incarnation for pair in self._pairs.values()}
