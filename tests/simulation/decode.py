"""A decode node's process: its Decode service, and the pairs with prefill nodes that send it KV."""

from functools import partial

from baton.core.errors import BatonError
from baton.engine.events import StepEvents
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from decode_node import commands as c
from decode_node import events as e
from decode_node.tag_numbers import SenderNumbers
from kvtransfer.leases import LeaseTotals
from tests.simulation.decode_side import DecodeSide, OfLeases
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
        self.state = node_status_pb2.PeerState()


class DecodeProcess(Node):
    """One life of a decode node."""

    role = node_status_pb2.ROLE_DECODE

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
        self.decoding = DecodeSide(self, on_lease=self._lease, check_blocks=self._check_not_leased)
        self._sender_numbers = SenderNumbers()
        self._pairs: dict[int, _Pair] = {}

    # ---- the machine

    def handle(self, event: e.Event) -> None:
        self.decoding.handle(event)

    def _lease(self, command: OfLeases) -> None:
        match command:
            case c.OpenLease(grant):
                self.receiver.open(grant, partial(self.handle, e.LeaseOpened(grant.number)))
            case c.CloseLease(lease):
                self.receiver.close(lease, self._lease_closed, partial(self._lease_failed, lease))
            case c.SendLeaseEnded(lease):
                for pair in self._pairs.values():
                    pair.stream.to_client(pb.PairResponse(lease_ended=pb.LeaseEnded(lease=lease)))

    def _check_not_leased(self, engine_id: str) -> None:
        self.receiver.check_not_leased(self.device.blocks_of(engine_id), engine_id)

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
            return self.decoding.accept(stream)
        pair = _Pair(stream)
        return partial(self._pair_message, pair), partial(self._pair_ended, pair)

    def _pair_message(self, pair: _Pair, message: pb.PairRequest) -> None:
        match message.WhichOneof("message"):
            case "hello":
                info = message.hello.info
                pair.number = self._sender_numbers.draw(1)
                pair.state = node_status_pb2.PeerState(
                    name=info.name,
                    address=info.address,
                    incarnation=info.incarnation,
                    phase=node_status_pb2.PEER_PHASE_READY,
                )
                self._pairs[pair.number] = pair
                self.receiver.peers[pair.number] = info.incarnation
                self.changed()
                accepted = pb.PairAccepted(info=self.info, sender_number=pair.number)
                pair.stream.to_client(pb.PairResponse(accepted=accepted))
            case "hand_over":
                self.handle(e.HandOverReceived(pair.number, message.hand_over, pair.state.incarnation))
            case "quiet":
                self.handle(e.QuietReceived(pair.number, message.quiet, pair.state.incarnation))

    def lied_to(self, incarnation: int, message: pb.PairRequest) -> None:
        """A paired prefill node sends this."""
        for pair in self._pairs.values():
            if pair.state.incarnation == incarnation:
                self._pair_message(pair, message)

    def _pair_ended(self, pair: _Pair, _: BatonError | None) -> None:
        if pair.number:
            del self._pairs[pair.number]
            self.life.after(0.001 * self.world.random.random(), partial(self._disconnected, pair))

    def _disconnected(self, pair: _Pair) -> None:
        leases = self.receiver.disconnect(pair.number)
        self.handle(e.PeerLost(pair.number, pair.state.name, leases))
        self._sender_numbers.give_back(pair.number)

    def peer_states(self) -> tuple[node_status_pb2.PeerState, ...]:
        return tuple(pair.state for pair in self._pairs.values())

    # ---- the process

    @property
    def busy(self) -> bool:
        return self.decoding.machine.busy or self.receiver.leases.open_leases > 0

    @property
    def requests_waiting(self) -> int:
        return self.device.load.requests_waiting + self.decoding.machine.waiting

    def drain(self) -> None:
        self.draining = True
        self.handle(e.DrainStarted())

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
