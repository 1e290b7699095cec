"""Many nodes without engines in one process: real Node services on ports of their own, and pairs that are made at once.

A gateway cannot tell them from idle nodes. They serve no requests.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop

from baton.core.block_keys import BlockKey
from baton.core.types import AdapterRef
from baton.node.cache_events import CacheEvents
from baton.node.service import NodeParts, NodeService
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2 as pb
from baton.rpc.channels import channel_options

# Step costs as a GPU node reports them: one point for each group of token counts.
_POINTS = tuple((1 << power, 0.005 + 2.5e-5 * (1 << power)) for power in range(13))

Context = grpc.aio.ServicerContext[Any, Any]


class _EmptyCache:
    """A prefix cache without blocks."""

    def cached_keys(self) -> list[BlockKey]:
        return []

    def follow(self) -> None:
        """Nothing changes."""

    def take_changes(self) -> dict[bytes, BlockKey | None]:
        return {}

    def outside(self, digests: Iterable[bytes]) -> list[bytes]:  # noqa: ARG002
        return []

    def only_below(self, outside: Iterable[bytes]) -> list[bytes]:  # noqa: ARG002
        return []


class LightNodes:
    """All nodes of one process, by address.

    Args:
        model: the identity that every node reports.
    """

    def __init__(self, model: pb.ModelIdentity) -> None:
        self.model = model
        self.statuses: dict[str, pb.NodeStatus] = {}
        self.connects = self.messages = 0
        self._servers: list[grpc.aio.Server] = []

    async def start(self, role: pb.Role.ValueType) -> str:
        """Starts one node; returns its address."""
        server = grpc.aio.server(options=channel_options())
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        status = self.statuses[address] = idle_status(self.model, role, address, incarnation=1 + len(self.statuses))
        service = _CountingService(self, partial(_never, status))
        parts = NodeParts(
            status=partial(_copied, status),
            drain=_nothing,
            switch=_no_switch,
            cache=CacheEvents(_EmptyCache(), incarnation=status.info.incarnation),
            load_adapter=_no_adapter,
            unload_adapter=_nothing,
            expert_load=_no_load,
            drop_kv=_no_drop,
        )
        service.serve(parts)
        node_pb2_grpc.add_NodeServicer_to_server(service, server)
        if role == pb.ROLE_PREFILL:
            prefill_pb2_grpc.add_PrefillServicer_to_server(_LightPrefill(self, status), server)
        await server.start()
        self._servers.append(server)
        return address

    async def close(self) -> None:
        await asyncio.gather(*(server.stop(None) for server in self._servers))

    def pair(self, prefill: pb.NodeStatus, decode_address: str) -> pb.PeerState:
        """Makes the pair, unless it is there; both statuses have it then."""
        self.connects += 1
        decode = self.statuses[decode_address]
        for peer in prefill.peers:
            if peer.address == decode_address:
                return peer
        decode.peers.append(ready_peer(prefill.info))
        prefill.peers.append(ready_peer(decode.info))
        return prefill.peers[-1]


class _CountingService(NodeService):
    """The Node service, which counts the statuses that it sends."""

    def __init__(self, nodes: LightNodes, loading: Callable[[], pb.NodeStatus]) -> None:
        super().__init__(loading)
        self._nodes = nodes

    async def Watch(self, request: node_pb2.WatchRequest, context: Context) -> AsyncIterator[pb.NodeStatus]:  # noqa: N802
        async for status in super().Watch(request, context):
            self._nodes.messages += 1
            yield status


class _LightPrefill(prefill_pb2_grpc.PrefillServicer):
    """The Prefill service of one node, which only connects."""

    def __init__(self, nodes: LightNodes, status: pb.NodeStatus) -> None:
        self._nodes, self._status = nodes, status

    async def Connect(self, request: prefill_pb2.ConnectRequest, context: Context) -> pb.PeerState:  # noqa: ARG002, N802
        return self._nodes.pair(self._status, request.decode_address)

    async def Prefill(  # noqa: N802
        self,
        request: prefill_pb2.PrefillRequest,  # noqa: ARG002
        context: Context,
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{self._status.info.name} has no engine")
        yield prefill_pb2.PrefillEvent()  # makes it a generator, as gRPC expects of a streaming method

    async def Pool(  # noqa: N802
        self,
        request: prefill_pb2.PoolRequest,
        context: Context,
    ) -> prefill_pb2.PoolResponse:
        raise NotImplementedError(f"{self._status.info.name} has no engine")


def idle_status(model: pb.ModelIdentity, role: pb.Role.ValueType, address: str, *, incarnation: int) -> pb.NodeStatus:
    """The status of an idle node with one GPU, as large as a real one's."""
    costs = pb.StepCosts(
        points=[pb.TokensCost(tokens=tokens, seconds=seconds) for tokens, seconds in _POINTS],
        key_s=1e-9,
        pair_s=1e-9,
        decode_row_s=1e-5,
    )
    name = "prefill" if role == pb.ROLE_PREFILL else "decode"
    return pb.NodeStatus(
        info=pb.NodeInfo(
            name=f"baton-{name}-7f9c8d-{incarnation:05d}",
            address=address,
            role=role,
            incarnation=incarnation,
            package_version="1.0.0",
            model=model,
            cache_spec=pb.CacheSpec(kind=pb.KV_KIND_GQA, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
            cache_shape=pb.CacheShape(layout="NHD", block_size=16, num_blocks=30_000),
            wire=pb.WireVersions(oldest=1, newest=6),
            max_context_tokens=100_000,
            model_context_tokens=131_072,
            tensor_parallel_size=1,
            cache_identity="0123456789abcdef",
            also_decodes=role == pb.ROLE_PREFILL,
        ),
        blocks_total=30_000,
        blocks_free=30_000,
        blocks_open=[30_000],
        step_costs=costs,
        step_profile=costs,
        max_batch_requests=256,
        max_batch_tokens=8192,
        gpus=[
            pb.GpuState(
                name="NVIDIA H100 80GB HBM3",
                memory_total_bytes=85 * 10**9,
                memory_used_bytes=70 * 10**9,
                busy_share=0.0,
            )
        ],
        prompt_tokens_total=0,
        generated_tokens_total=0,
    )


def ready_peer(info: pb.NodeInfo) -> pb.PeerState:
    """A ready pair with this node, as the other node's status has it."""
    return pb.PeerState(
        name=info.name,
        address=info.address,
        incarnation=info.incarnation,
        phase=pb.PEER_PHASE_READY,
        transport="tcp",
        gigabytes_per_s=12.5,
        latency_s=2e-5,
    )


def _nothing(_: object) -> None:
    """Light nodes do not drain, and have no adapters."""


def _copied(status: pb.NodeStatus) -> pb.NodeStatus:
    copy = pb.NodeStatus()
    copy.CopyFrom(status)
    return copy


def _never(status: pb.NodeStatus) -> pb.NodeStatus:
    raise AssertionError(f"{status.info.name} serves from its start")


async def _no_switch(request: node_pb2.SwitchRoleRequest) -> AsyncIterator[pb.RoleSwitchProgress]:
    raise NotImplementedError(str(request))
    yield


async def _no_adapter(name: str, path: Path) -> AdapterRef:
    raise NotImplementedError(f"{name} in {path}")


async def _no_drop(_: node_pb2.DropKvRequest) -> node_pb2.DropKvResponse:
    raise NotImplementedError


async def _no_load() -> node_pb2.GetExpertLoadResponse:
    raise NotImplementedError


def serve(model: bytes, prefills: int, decodes: int, parent: Connection) -> None:
    """Serves nodes in this process until the parent closes the connection. Sends the addresses of prefill and decode
    nodes first, then, for every message, the numbers of Connect calls and of statuses so far."""

    async def served() -> None:
        nodes = LightNodes(pb.ModelIdentity.FromString(model))
        roles = {pb.ROLE_PREFILL: prefills, pb.ROLE_DECODE: decodes}
        parent.send([[await nodes.start(role) for _ in range(count)] for role, count in roles.items()])
        loop = asyncio.get_running_loop()
        try:
            while True:
                await loop.run_in_executor(None, parent.recv)
                parent.send((nodes.connects, nodes.messages))
        except EOFError:
            await nodes.close()

    uvloop.run(served())
