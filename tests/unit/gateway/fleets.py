"""A fleet of nodes that exist only as statuses, and requests to it."""

from baton.core.sampling import ResolvedSampling
from baton.core.types import LocalPolicy
from baton.gateway.core.request import Request, Rules
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.node_table import FleetCommand
from baton.gateway.fleet.router import RoutedRequest
from baton.protos.v1 import node_status_pb2

MODEL = node_status_pb2.ModelIdentity(name="m", architecture="Llama", config_digest="digest", weights_digest="weights")
PREFILL, DECODE = node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE


def peer(
    incarnation: int, phase: node_status_pb2.PeerPhase.ValueType = node_status_pb2.PEER_PHASE_READY
) -> node_status_pb2.PeerState:
    return node_status_pb2.PeerState(incarnation=incarnation, name=f"peer-{incarnation}", phase=phase, transport="cma")


def status(
    role: node_status_pb2.Role.ValueType, incarnation: int, *peers: node_status_pb2.PeerState
) -> node_status_pb2.NodeStatus:
    info = node_status_pb2.NodeInfo(
        name=f"node-{incarnation}",
        role=role,
        incarnation=incarnation,
        model=MODEL,
        max_context_tokens=1000,
        cache_shape=node_status_pb2.CacheShape(block_size=16, layout="NHD"),
    )
    return node_status_pb2.NodeStatus(info=info, blocks_free=100, peers=peers)


class SmallFleet(Fleet):
    """Prefill nodes p1, p2, ... of incarnations 11, 12, ..., decode nodes d1, d2, ... of 21, 22, ...; all paired.

    Args:
        also_decode: whether the prefill nodes do.
    """

    def __init__(
        self, prefills: int, decodes: int, policy: LocalPolicy = LocalPolicy.PREFER, *, also_decode: bool = False
    ) -> None:
        super().__init__(MODEL, 1000, policy)
        self._also_decode = also_decode
        self._num_decodes = decodes
        for number in range(1, prefills + 1):
            self.add(PREFILL, f"p{number}")
            self.connect(f"p{number}", 0.0)
        for number in range(1, decodes + 1):
            self.add(DECODE, f"d{number}")
            self.connect(f"d{number}", 0.0)

    def connect(self, address: str, now_s: float, *, restarts: int = 0) -> list[FleetCommand]:
        """The node sends its status; after a restart it has another incarnation."""
        number = int(address[1:]) + 100 * restarts
        if address.startswith("d"):
            return self.status_received(DECODE, address, status(DECODE, 20 + number), now_s)
        peers = [peer(20 + decode) for decode in range(1, self._num_decodes + 1)]
        reported = status(PREFILL, 10 + number, *peers)
        reported.info.also_decodes = self._also_decode
        return self.status_received(PREFILL, address, reported, now_s)

    def lose(self, address: str, reason: str = "gone", now_s: float = 0.0) -> list[FleetCommand]:
        return self.lost(DECODE if address.startswith("d") else PREFILL, address, reason, now_s)


def decoding_node(fleet: Fleet, wanted: RoutedRequest) -> FleetNode | None:
    """The node on which the request would be placed."""
    placement = fleet.place(wanted, 0.0)
    return None if placement is None else fleet.decoding_node(placement.decode)


def rules(policy: LocalPolicy = LocalPolicy.PREFER, *, failover_wait_s: float = 20.0) -> Rules:
    return Rules(
        policy,
        max_attempts=3,
        max_queue_s=10.0,
        prefill_stall_s=10.0,
        decode_stall_s=30.0,
        failover_wait_s=failover_wait_s,
    )


def request(*, timeout_s: float = 100.0, max_tokens: int = 4) -> Request:
    sampling = ResolvedSampling(max_tokens=max_tokens, temperature=0.0)
    return Request("r", list(range(1, 65)), sampling, "", started_at_s=0.0, timeout_s=timeout_s)
