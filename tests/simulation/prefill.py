"""A prefill node's process: the shell around the real `PrefillMachine`, with its pairs.

It may also serve Decode, from the same device.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from baton.core.errors import BatonError, InternalError, NoNode, UnknownLease
from baton.engine.events import StepEvents
from baton.protos.internal.v1 import decode_pb2
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.protos.v1 import node_status_pb2
from decode_node import events as decode_events
from kvtransfer.segments import Segment
from prefill_node import commands as c
from prefill_node import events as e
from prefill_node.machine import PrefillMachine, PrefillRules
from tests.simulation.decode_side import DecodeSide
from tests.simulation.invariants import violated
from tests.simulation.network import Life, OnEnd, OnMessage, Stream
from tests.simulation.node import Node
from tests.simulation.transfer import SPEC, Link, Sender
from tests.simulation.world import World

_PAIR_TIMEOUT_S = 1.0


class _Pair:
    """One decode node, for the life of one Pair stream."""

    def __init__(self, number: int, address: str) -> None:
        self.number = number
        self.sender_number = 0
        self.max_context_tokens: int | None = None
        self.state = node_status_pb2.PeerState(
            name=address, address=address, phase=node_status_pb2.PEER_PHASE_CONNECTING, transport="simulated"
        )
        self.stream: Stream | None = None
        self.waiting: list[Callable[[], None]] = []

    @property
    def ready(self) -> bool:
        return self.state.phase == node_status_pb2.PEER_PHASE_READY

    @property
    def lost(self) -> bool:
        return self.state.phase == node_status_pb2.PEER_PHASE_LOST

    def enter(self, phase: node_status_pb2.PeerPhase.ValueType) -> None:
        state = node_status_pb2.PeerState()
        state.CopyFrom(self.state)
        state.phase = phase
        self.state = state
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            action()


class _Call:
    """One Prefill call, from the request to its end."""

    def __init__(self, number: int, stream: Stream) -> None:
        self.number = number
        self.stream = stream
        self.open = True
        self.begun = False


class PrefillProcess(Node):
    """One life of a prefill node."""

    role = node_status_pb2.ROLE_PREFILL

    def __init__(self, world: World, life: Life) -> None:
        super().__init__(world, life, world.scenario.prefill)
        self.info.also_decodes = world.random.random() < world.scenario.also_decodes
        self.decoding = DecodeSide(self, on_lease=None, check_blocks=_nothing) if self.info.also_decodes else None
        self.sender = Sender(
            life,
            world.network,
            world.random,
            self.device,
            world.scenario.weather,
            segment_bytes=world.scenario.segment_bytes,
        )
        self.machine = PrefillMachine(
            PrefillRules(name=life.address, spec=SPEC, prefetches=world.scenario.prefetch_s > 0)
        )
        self._numbers = itertools.count(1)
        self._pair_numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._pairs: dict[str, _Pair] = {}
        self._by_number: dict[int, _Pair] = {}

    # ---- the machine

    def handle(self, event: e.Event) -> None:
        commands = self.machine.handle(event, self.world.clock.now_s)
        self.world.trace.handled(self.life.address, [event], commands)
        for command in commands:
            self._execute(command)
        self.changed()

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.Prefetch(call, _):
                self.life.after(self.world.scenario.prefetch_s, partial(self.handle, e.Prefetched(call)))
            case c.Submit(request):
                try:
                    self.device.submit(request, self.world.clock.now_s)
                except BatonError as error:
                    self.life.after(0.0, partial(self.handle, e.EngineRefused(int(request.request_id), error)))
            case c.Abort(call):
                self.device.abort(str(call), partial(self._aborted, call))
            case c.SendKV(call, job):
                self.sender.send(str(call), job, partial(self._send_over, call))
            case c.StopSending(call, peer, lease):
                self.sender.quiet(peer, lease, partial(self.handle, e.BecameQuiet(call)))
            case c.SendToPeer(peer, message):
                pair = self._by_number.get(peer)
                if pair is not None and pair.ready and pair.stream is not None:
                    pair.stream.to_server(message)
            case c.Respond(call, event):
                self._calls[call].stream.to_client(event)
            case c.EndCall(call, error):
                self._calls.pop(call).stream.finish(error)

    def _send_over(self, call: int, segments: Sequence[Segment], error: BatonError | None) -> None:
        self.handle(e.Sent(call, segments) if error is None else e.SendFailed(call, error))

    def _aborted(self, call: int) -> None:
        self.handle(e.Aborted(call))
        if self.decoding is not None:
            self.decoding.handle(decode_events.RoomFreed())

    def step_done(self, events: StepEvents) -> None:
        self.handle(e.StepDone(events))
        if self.decoding is not None:
            self.decoding.handle(decode_events.StepDone(events))

    # ---- streams

    def accept(self, kind: str, stream: Stream) -> tuple[OnMessage, OnEnd]:
        if kind == "watch":
            return self.watch(stream)
        if kind == "connect":
            return partial(self._connect, stream), _nothing
        if kind == "session":
            return self._session(stream)
        call = _Call(next(self._numbers), stream)
        return partial(self._called, call), partial(self._call_ended, call)

    def _session(self, stream: Stream) -> tuple[OnMessage, OnEnd]:
        if self.decoding is not None:
            return self.decoding.accept(stream)
        stream.finish(InternalError(f"{self.life.address} does not serve Decode"))
        return _nothing, _nothing

    def _connect(self, stream: Stream, request: pb.ConnectRequest) -> None:
        def answer() -> None:
            stream.to_client(pair.state)
            stream.finish(None)

        pair = self._pair(request.decode_address)
        self._when_settled(pair, answer)

    def _called(self, call: _Call, request: pb.PrefillRequest) -> None:
        refusal = self.machine.refusal()
        if refusal is not None:
            call.stream.finish(refusal)
            return
        pair = self._pair(request.ticket.decode_address)
        self._when_settled(pair, partial(self._begin, call, request, pair))

    def _begin(self, call: _Call, request: pb.PrefillRequest, pair: _Pair) -> None:
        if not call.open:
            return
        if not pair.ready:
            call.stream.finish(NoNode(f"{request.ticket.decode_node} cannot be reached"))
        elif pair.state.incarnation != request.ticket.lease.incarnation:
            call.stream.finish(UnknownLease("the ticket is of another incarnation"))
        else:
            call.begun = True
            self._calls[call.number] = call
            facts = e.PeerFacts(pair.number, pair.sender_number, "simulated", "", pair.max_context_tokens)
            groups = self.world.scenario.layers_per_group
            self.handle(e.Called(call.number, request, facts, groups))

    def _call_ended(self, call: _Call, _: BatonError | None) -> None:
        call.open = False
        if call.begun:
            self.handle(e.CallCancelled(call.number))

    # ---- pairs

    def _pair(self, address: str) -> _Pair:
        pair = self._pairs.get(address)
        if pair is None or pair.lost:
            pair = self._pairs[address] = _Pair(next(self._pair_numbers), address)
            self._by_number[pair.number] = pair
            pair.stream = self.world.network.open(
                self.life, address, "pair", partial(self._pair_message, pair), partial(self._pair_ended, pair)
            )
            pair.stream.to_server(decode_pb2.PairRequest(hello=decode_pb2.PairHello(info=self.info)))
            self.life.after(_PAIR_TIMEOUT_S, partial(self._pair_timeout, pair))
        return pair

    def _when_settled(self, pair: _Pair, action: Callable[[], None]) -> None:
        if pair.ready or pair.lost:
            action()
        else:
            pair.waiting.append(action)

    def _pair_timeout(self, pair: _Pair) -> None:
        if not pair.ready and not pair.lost:
            assert pair.stream is not None
            pair.stream.cancel()
            self._pair_ended(pair, None)

    def _pair_message(self, pair: _Pair, message: decode_pb2.PairResponse) -> None:
        match message.WhichOneof("message"):
            case "accepted":
                accepted = message.accepted
                pair.sender_number = accepted.sender_number
                pair.max_context_tokens = accepted.info.max_context_tokens
                # NOTE: a pair that connects again is measured again. Only this makes the status after a second loss
                # differ from the status after the first one, so that a gateway notices the second loss.
                pair.state.latency_s = self.world.random.random()
                pair.state.incarnation = accepted.info.incarnation
                receiver = self.world.receivers[accepted.info.incarnation]
                self.sender.links[pair.number] = Link(self.life, pair.state.address, accepted.sender_number, receiver)
                pair.enter(node_status_pb2.PEER_PHASE_READY)
                self.changed()
            case "lease_ended":
                self.handle(e.LeaseEnded(pair.number, message.lease_ended.lease))

    def _pair_ended(self, pair: _Pair, _: BatonError | None) -> None:
        pair.enter(node_status_pb2.PEER_PHASE_LOST)
        del self._by_number[pair.number]
        self.handle(e.PeerLost(pair.number, NoNode(f"{pair.state.name} is gone")))
        self.life.after(0.001 * self.world.random.random(), partial(self.sender.disconnect, pair.number))

    def peer_states(self) -> tuple[node_status_pb2.PeerState, ...]:
        return tuple(pair.state for pair in self._pairs.values())

    # ---- the process

    @property
    def busy(self) -> bool:
        return self.machine.busy or self.sender.busy or self.decodes

    @property
    def decodes(self) -> bool:
        """Whether any request is live that it serves whole."""
        return self.decoding is not None and self.decoding.machine.busy

    @property
    def requests_waiting(self) -> int:
        return super().requests_waiting + (0 if self.decoding is None else self.decoding.machine.waiting)

    def drain(self) -> None:
        self.draining = True
        self.handle(e.DrainStarted())
        if self.decoding is not None:
            self.decoding.handle(decode_events.DrainStarted())

    def close(self) -> None:
        self.handle(e.Closing())
        if self.decoding is not None:
            self.decoding.handle(decode_events.Closing())

    def check(self) -> None:
        super().check()
        self.sender.check()

    def check_idle(self) -> None:
        super().check_idle()
        if self._calls:
            violated("I5", f"{self.life.address}: calls {sorted(self._calls)} were never ended")

    @property
    def paired_with(self) -> set[int]:
        """Incarnations of the decode nodes that this node may send to."""
        return {pair.state.incarnation for pair in self._pairs.values() if pair.ready}


def _nothing(_: object) -> None:
    """Does nothing: a Connect call is answered whether or not its gateway still waits, and no block is ever leased."""
