"""The common part of prefill and decode nodes: the engine's device, and Watch streams that report the status."""

from collections.abc import Hashable

from baton.core.errors import BatonError
from baton.engine.events import StepEvents
from baton.protos.v1 import node_status_pb2
from tests.simulation.device import Device
from tests.simulation.network import Life, OnEnd, OnMessage, Stream
from tests.simulation.scenario import Sizes
from tests.simulation.world import World

MODEL = node_status_pb2.ModelIdentity(
    architecture="simulated", config_digest="config", weights_digest="weights", name="model"
)
STATUS_INTERVAL_S = 0.1
_STREAM_SHARE = 0.75


class Node:
    """One life of a node process."""

    role: node_status_pb2.Role.ValueType

    def __init__(self, world: World, life: Life, sizes: Sizes) -> None:
        self.world = world
        self.life = life
        self.draining = False
        self.version = 0
        self.info = node_status_pb2.NodeInfo(
            name=life.address,
            address=life.address,
            role=self.role,
            incarnation=life.incarnation,
            model=MODEL,
            cache_shape=node_status_pb2.CacheShape(
                layout="NHD", block_size=sizes.block_size, num_blocks=sizes.num_blocks
            ),
            max_context_tokens=sizes.context_tokens,
        )
        self.device = Device(
            life,
            world.random,
            sizes,
            stream_share=_STREAM_SHARE if self.role == node_status_pb2.ROLE_PREFILL else 1.0,
            on_step=self.step_done,
            on_change=self.changed,
        )
        self._peer_states: tuple[node_status_pb2.PeerState, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether any request is live."""
        raise NotImplementedError

    @property
    def requests_waiting(self) -> int:
        return self.device.load.requests_waiting

    def step_done(self, events: StepEvents) -> None:
        raise NotImplementedError

    def changed(self) -> None:
        """Notes that the node may have changed: its invariants and its status are checked."""
        self.version += 1
        self.world.touch(self)

    def peer_states(self) -> tuple[node_status_pb2.PeerState, ...]:
        """The node's peers; new objects whenever anything in them has changed."""
        raise NotImplementedError

    def drain(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """The invariants that hold after every event."""
        self.device.check_blocks()

    def check_idle(self) -> None:
        """The invariants that hold when all requests have ended."""
        self.device.check_free()

    # ---- Watch

    def watch(self, stream: Stream) -> tuple[OnMessage, OnEnd]:
        watcher = _Watcher(self, stream)
        self.life.after(0.0, watcher.report)
        return watcher.on_message, watcher.on_end

    def status(self) -> node_status_pb2.NodeStatus:
        load = self.device.load
        return node_status_pb2.NodeStatus(
            info=self.info,
            draining=self.draining,
            blocks_total=load.blocks_total,
            blocks_free=load.blocks_free,
            blocks_open=load.blocks_open,
            blocks_leased=load.blocks_leased,
            requests_running=load.requests_running,
            requests_waiting=self.requests_waiting,
            tokens_waiting=load.tokens_waiting,
            requests_total=load.requests_total,
            peers=self.peer_states(),
        )

    def fingerprint(self) -> Hashable:
        """A value that differs whenever the status does."""
        load = self.device.load
        return (
            self.draining,
            load.blocks_free,
            load.blocks_open,
            load.requests_running,
            self.requests_waiting,
            load.requests_total,
            load.tokens_waiting,
            tuple((state.incarnation, state.phase, state.latency_s) for state in self.peer_states()),
        )


class _Watcher:
    """One Watch stream: sends the status at once, and again whenever it has changed."""

    def __init__(self, node: Node, stream: Stream) -> None:
        self._node = node
        self._stream = stream
        self._open = True
        self._last: Hashable = None
        self._seen = -1

    def on_message(self, _: object) -> None:
        """Never called: Watch clients send nothing."""

    def on_end(self, _: BatonError | None) -> None:
        self._open = False

    def report(self) -> None:
        if not self._open or self._stream.broken:
            return
        if self._seen != self._node.version:
            self._seen = self._node.version
            fingerprint = self._node.fingerprint()
            if fingerprint != self._last:
                self._last = fingerprint
                self._stream.to_client(self._node.status())
        self._node.life.after(STATUS_INTERVAL_S, self.report)
