"""A large cluster under virtual time in one process: real fleets, pairings, status logs and messages; no sockets.

Each gateway has the real `Fleet` and `Pairing`, each node the real `StatusLog`. Every message is serialized and parsed,
and the time that gateways compute is measured. Pairs take a given time of both nodes, one after the other.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from zlib import crc32

from numpy.random import default_rng

from baton.core.types import LocalPolicy
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import settled
from baton.gateway.fleet.router import RoutedRequest
from baton.gateway.fleet.watch_pace import WatchPace
from baton.gateway.request.pairing import ConnectNodes, Pairing
from baton.node.status_feed import StatusLog
from baton.protos.v1 import node_status_pb2 as pb
from baton.rpc.convert_node import take_unchanged
from bench.light_nodes import idle_status, ready_peer

MODEL = pb.ModelIdentity(architecture="Llama", config_digest="c" * 64, weights_digest="w" * 64, name="llama-8b")
_DELAY_S = 0.001
_CHECK_S = 0.2  # as `baton.gateway.request.connections`
_OPEN_S = 0.002  # that long a gateway takes to open one connection
_HANDSHAKES_MAX = 64  # as `decode_node.prefill_peers`
_MEASURED_EACH = 17

Action = Callable[[], None]


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, *, until_s: float) -> None:
        """Runs all actions up to that time."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.now_s = until_s


@dataclass(eq=False)
class SimulatedStream:
    """One gateway's status stream with one node."""

    gateway: "SimulatedGateway"
    node: "SimulatedNode"
    interval_s: float
    repeat_s: float
    sent: int = 0
    sent_at_s: float = -1e9
    due: bool = False
    last: pb.NodeStatus = field(default_factory=pb.NodeStatus)


class SimulatedNode:
    """One life of a node: its status, its pairs, and the streams of gateways that watch it."""

    def __init__(self, cluster: "SimulatedCluster", role: pb.Role.ValueType, address: str, incarnation: int) -> None:
        self.cluster = cluster
        self.alive = True
        self.status = idle_status(MODEL, role, address, incarnation=incarnation)
        if cluster.zones:  # the same after a restart
            self.status.info.topology.append(f"zone={crc32(address.encode()) % cluster.zones}")
        self.log = StatusLog()
        self.streams: list[SimulatedStream] = []
        self.connects = self.handshakes = 0
        self._linked_until_s = 0.0
        self._pairs: dict[str, list[Callable[[pb.PeerState], None]]] = {}
        self.changed()

    @property
    def incarnation(self) -> int:
        return self.status.info.incarnation

    def changed(self) -> None:
        """The status has changed: every stream sends it, at the earliest one interval after its last message."""
        copy = pb.NodeStatus()
        copy.CopyFrom(self.status)
        self.log.take(copy, self.cluster.clock.now_s)
        for stream in self.streams:
            if not stream.due:
                stream.due = True
                pause_s = max(0.0, stream.sent_at_s + stream.interval_s - self.cluster.clock.now_s)
                self.cluster.clock.after(pause_s, partial(self._send, stream))

    def watch(self, stream: SimulatedStream) -> None:
        self.streams.append(stream)
        stream.due = True
        self._send(stream)
        self._repeat(stream)

    def _send(self, stream: SimulatedStream) -> None:
        if not (self.alive and stream.gateway.alive):
            return
        data = self.log.since(stream.sent).SerializeToString()
        stream.due, stream.sent, stream.sent_at_s = False, self.log.version, self.cluster.clock.now_s
        self.cluster.clock.after(_DELAY_S, partial(stream.gateway.received, stream, data))

    def _repeat(self, stream: SimulatedStream) -> None:
        if not (self.alive and stream.gateway.alive):
            return
        next_s = stream.sent_at_s + stream.repeat_s
        if self.cluster.clock.now_s >= next_s - 1e-9:
            self._send(stream)
            next_s = self.cluster.clock.now_s + stream.repeat_s
        self.cluster.clock.after(next_s - self.cluster.clock.now_s, partial(self._repeat, stream))

    # ---- pairs

    def connect(self, decode_address: str, answer: Callable[[pb.PeerState], None]) -> None:
        """A prefill node's Connect call."""
        self.connects += 1
        for peer in self.status.peers:
            if peer.address == decode_address and peer.phase == pb.PEER_PHASE_READY:
                answer(peer)
                return
        waiting = self._pairs.setdefault(decode_address, [])
        waiting.append(answer)
        if len(waiting) == 1:
            self._begin(decode_address)

    def _begin(self, decode_address: str) -> None:
        other, clock = self.cluster.nodes[decode_address], self.cluster.clock
        if not (self.alive and other.alive) or other.handshakes >= _HANDSHAKES_MAX:
            self._settle(other, pb.PeerState(address=decode_address, phase=pb.PEER_PHASE_LOST, detail="overloaded"))
            return
        other.handshakes += 1
        end_s = max(clock.now_s, self._linked_until_s, other._linked_until_s) + self.cluster.pair_s
        self._linked_until_s = other._linked_until_s = end_s
        clock.after(end_s - clock.now_s, partial(self._paired, other))

    def _paired(self, other: "SimulatedNode") -> None:
        other.handshakes -= 1
        if not (self.alive and other.alive):
            self._settle(other, pb.PeerState(address=other.status.info.address, phase=pb.PEER_PHASE_LOST))
            return
        self.status.peers.append(ready_peer(other.status.info))
        other.status.peers.append(ready_peer(self.status.info))
        self._settle(other, self.status.peers[-1])
        self.changed()
        other.changed()

    def _settle(self, other: "SimulatedNode", state: pb.PeerState) -> None:
        for answer in self._pairs.pop(other.status.info.address, ()):
            answer(state)

    def lost_peer(self, incarnation: int) -> None:
        kept = [peer for peer in self.status.peers if peer.incarnation != incarnation]
        if len(kept) != len(self.status.peers):
            del self.status.peers[:]
            self.status.peers.extend(kept)
            self.changed()


class SimulatedGateway:
    """A gateway's fleet and pairing, with what they receive and the time that they compute."""

    def __init__(self, cluster: "SimulatedCluster", seed: int) -> None:
        self.cluster = cluster
        self.alive = True
        self.fleet = Fleet(MODEL, 100_000, LocalPolicy.STRICT, random=default_rng(seed))
        self.pairing = Pairing(self.fleet, 60.0, default_rng(seed))
        self.messages = self.bytes = self.connects = 0
        self.cpu_s = 0.0
        self._blocks = 0
        self._roles: dict[str, pb.Role.ValueType] = {}
        pace = WatchPace(len(cluster.nodes))
        for number, (address, node) in enumerate(cluster.nodes.items()):
            role = self._roles[address] = node.status.info.role
            self.fleet.add(role, address)
            cluster.clock.after(_OPEN_S * number, partial(self.open, address, pace))
        cluster.clock.after(_CHECK_S * Random(seed).random(), self._check)

    def open(self, address: str, pace: WatchPace) -> None:
        node = self.cluster.nodes[address]
        if node.alive and self.alive:
            node.watch(SimulatedStream(self, node, pace.interval_s, pace.repeat_s))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Adds the time of the block to the gateway's. One block of many is measured: to read the clock takes longer
        than most blocks."""
        self._blocks += 1
        if self._blocks % _MEASURED_EACH:
            yield
            return
        begun_s = time.process_time()
        yield
        self.cpu_s += _MEASURED_EACH * (time.process_time() - begun_s)

    def received(self, stream: SimulatedStream, data: bytes) -> None:
        if not stream.node.alive:
            return
        self.messages += 1
        self.bytes += len(data)
        address = stream.node.status.info.address
        with self.computing():
            status = pb.NodeStatus.FromString(data)
            take_unchanged(status, stream.last)
            stream.last = status
            self.fleet.status_received(self._roles[address], address, status, self.cluster.clock.now_s)

    def lost(self, address: str) -> None:
        with self.computing():
            self.fleet.lost(self._roles[address], address, "it was restarted", self.cluster.clock.now_s)

    def _check(self) -> None:
        if not self.alive:
            return
        begun_s = time.process_time()
        commands = self.pairing.check(self.cluster.clock.now_s)
        self.cpu_s += time.process_time() - begun_s
        for command in commands:
            if isinstance(command, ConnectNodes):
                self.connects += 1
                self.cluster.clock.after(_DELAY_S, partial(self._connect, command))
        self.cluster.clock.after(_CHECK_S, self._check)

    def _connect(self, command: ConnectNodes) -> None:
        node = self.cluster.nodes[command.prefill_address]

        def answer(state: pb.PeerState) -> None:
            self.cluster.clock.after(_DELAY_S, partial(self._answered, command, state.SerializeToString()))

        if node.incarnation == command.pair[0]:
            node.connect(command.decode_address, answer)

    def _answered(self, command: ConnectNodes, data: bytes) -> None:
        with self.computing():
            state = pb.PeerState.FromString(data)
            self.fleet.node(pb.ROLE_PREFILL, command.prefill_address).take_peer(state)
            self.pairing.answered(command.pair, state, self.cluster.clock.now_s)

    @property
    def settled(self) -> bool:
        """Whether it has reached all nodes, and each chosen pair is ready."""
        nodes = list(self.fleet.nodes())
        reached = all(node.reachable and node.incarnation in self.cluster.incarnations for node in nodes)
        return reached and all(settled(prefill, decode) for prefill, decode in self.fleet.pairs())

    @property
    def all_serve(self) -> bool:
        """Whether each node is reachable and has a partner."""
        ready = [node.ready_peers & self.cluster.incarnations for node in self.fleet.prefills.values()]
        having = frozenset[int]().union(*ready)
        return all(ready) and all(node.incarnation in having for node in self.fleet.decodes.values())

    def place(self, num_tokens: int) -> tuple[str, str] | None:
        """Chooses nodes for a request; returns their addresses."""
        with self.computing():
            placement = self.fleet.place(RoutedRequest(num_tokens, LocalPolicy.STRICT), self.cluster.clock.now_s)
            if placement is None or placement.prefill is None:
                return None
            for address, role in (
                (placement.prefill.address, pb.ROLE_PREFILL),
                (placement.decode.address, pb.ROLE_DECODE),
            ):
                self.fleet.node(role, address).note_sent(num_tokens)
        return placement.prefill.address, placement.decode.address


class SimulatedCluster:
    """All processes of one run.

    Args:
        pair_s: time of both nodes that one pair takes.
        zones: number of zones over which nodes are spread; 0: nodes report none.

    Attributes:
        unplaced: number of requests that found no pair of nodes.
    """

    def __init__(
        self, prefills: int, decodes: int, gateways: int, *, pair_s: float, seed: int = 1, zones: int = 0
    ) -> None:
        self.clock = Clock()
        self.random = Random(seed)
        self.pair_s = pair_s
        self.zones = zones
        self.nodes: dict[str, SimulatedNode] = {}
        self.incarnations: set[int] = set()
        self.unplaced = 0
        for role, count in ((pb.ROLE_PREFILL, prefills), (pb.ROLE_DECODE, decodes)):
            for number in range(count):
                self.start(role, f"10.{role}.{number // 250}.{number % 250}:7001")
        self.gateways = [SimulatedGateway(self, seed + number) for number in range(gateways)]

    def start(self, role: pb.Role.ValueType, address: str) -> SimulatedNode:
        incarnation = self.random.getrandbits(64)
        self.incarnations.add(incarnation)
        node = self.nodes[address] = SimulatedNode(self, role, address, incarnation)
        return node

    def share_within_zones(self) -> float:
        """The share of all pairs whose two nodes are in one zone."""
        zones = {node.incarnation: node.status.info.topology[0] for node in self.nodes.values()}
        pairs = [(node.incarnation, peer.incarnation) for node in self.nodes.values() for peer in node.status.peers]
        return sum(zones[one] == zones[other] for one, other in pairs) / len(pairs)

    def add_gateway(self) -> SimulatedGateway:
        """Starts one more gateway."""
        self.gateways.append(SimulatedGateway(self, 1000 + len(self.gateways)))
        return self.gateways[-1]

    def restart(self, addresses: list[str], *, down_s: float) -> None:
        """Ends these nodes; new ones come at their addresses."""
        for address in addresses:
            old = self.nodes[address]
            old.alive = False
            self.incarnations.discard(old.incarnation)
            for node in self.nodes.values():
                if node.alive:
                    node.lost_peer(old.incarnation)
            for gateway in self.gateways:
                gateway.lost(address)
            self.clock.after(down_s, partial(self._come_back, old))

    def _come_back(self, old: SimulatedNode) -> None:
        address = old.status.info.address
        self.start(old.status.info.role, address)
        pace = WatchPace(len(self.nodes))
        for gateway in self.gateways:
            self.clock.after(0.1 * self.random.random(), partial(gateway.open, address, pace))

    def serve(self, requests_per_s: float, seconds: float, *, prefill_s: float, decode_s: float) -> None:
        """Sends requests at random times through random gateways."""
        until_s = self.clock.now_s + seconds

        def come() -> None:
            placed = self.random.choice(self.gateways).place(2000)
            self.unplaced += placed is None
            for address, took_s in zip(placed or (), (prefill_s, prefill_s + decode_s), strict=False):
                self._work(self.nodes[address], +1)
                self.clock.after(took_s, partial(self._work, self.nodes[address], -1))
            if self.clock.now_s < until_s:
                self.clock.after(self.random.expovariate(requests_per_s), come)

        come()
        self.clock.run(until_s=until_s)

    def _work(self, node: SimulatedNode, change: int) -> None:
        node.status.requests_running += change
        node.status.requests_total += max(0, change)
        node.status.blocks_free -= 130 * change
        node.status.blocks_open[0] -= 130 * change
        node.changed()

    def until(self, done: Callable[[], bool], *, within_s: float, step_s: float = 0.1) -> float:
        """Runs until the condition holds; returns the virtual seconds that it took.

        Raises:
            RuntimeError: it does not hold within that time.
        """
        begun_s = self.clock.now_s
        while not done():
            if self.clock.now_s - begun_s > within_s:
                raise RuntimeError(f"the simulated cluster has not settled within {within_s:g} s")
            self.clock.run(until_s=self.clock.now_s + step_s)
        return self.clock.now_s - begun_s
