"""A decode node without a model, in a process of its own: each step has a token for every stream."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import grpc
import uvloop

from baton.gateway.text.model import read_served_model
from baton.protos.internal.v1 import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.rpc.channels import channel_options
from baton.rpc.status import client_may_leave
from baton.settings.config import DEMO_MODELS
from decode_node.events import SessionMessage
from decode_node.gateway_sessions import GatewaySessions

MODEL = DEMO_MODELS / "llama"
FIRST_STEP_S = 0.5  # until all clients have their first token
_INCARNATION = 21
_TOKENS = range(300, 1300)  # of whole words, for the most part

Context = grpc.aio.ServicerContext[Any, Any]


class ScriptedDecode(node_pb2_grpc.NodeServicer, decode_pb2_grpc.DecodeServicer):
    """A decode node without a model: once all streams' requests are there, each step has a token for every one.

    Args:
        pace: streams and seconds per step of the present round, which another process sets.
    """

    def __init__(self, identity: node_status_pb2.ModelIdentity, pace: Sequence[float]) -> None:
        info = node_status_pb2.NodeInfo(
            name="scripted", role=node_status_pb2.ROLE_DECODE, incarnation=_INCARNATION, model=identity,
            max_context_tokens=4096, cache_shape=node_status_pb2.CacheShape(block_size=16, layout="NHD"),
        )  # fmt: skip
        self.status = node_status_pb2.NodeStatus(
            info=info, blocks_free=1 << 20, blocks_total=1 << 20, max_batch_requests=1 << 12
        )
        self._pace = pace
        self._sessions = GatewaySessions(self._deliver, itertools.count(1))
        self._batches: dict[int, list[decode_pb2.SubmitRequest]] = {}  # by session
        self._stepping: asyncio.Task[None] | None = None

    async def Watch(
        self, request: node_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[node_status_pb2.NodeStatus]:
        while True:
            yield self.status
            await asyncio.sleep(1.0)

    async def Describe(self, request: node_pb2.DescribeRequest, context: Context) -> node_status_pb2.NodeStatus:
        return self.status

    async def Session(  # type: ignore[override]  # the stubs know generators only
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        with client_may_leave():
            await self._sessions.serve(context.peer(), requests, context.write)

    # ---- methods that a gateway does not need

    async def Drain(self, request: node_pb2.DrainRequest, context: Context) -> node_pb2.DrainResponse:
        await _refuse(context)

    async def SwitchRole(
        self, request: node_pb2.SwitchRoleRequest, context: Context
    ) -> AsyncIterator[node_status_pb2.RoleSwitchProgress]:
        await _refuse(context)
        yield node_status_pb2.RoleSwitchProgress()

    async def LoadAdapter(self, request: node_pb2.LoadAdapterRequest, context: Context) -> node_pb2.LoadAdapterResponse:
        await _refuse(context)

    async def UnloadAdapter(
        self, request: node_pb2.UnloadAdapterRequest, context: Context
    ) -> node_pb2.UnloadAdapterResponse:
        await _refuse(context)

    async def GetExpertLoad(
        self, request: node_pb2.GetExpertLoadRequest, context: Context
    ) -> node_pb2.GetExpertLoadResponse:
        await _refuse(context)

    async def DropKv(self, request: node_pb2.DropKvRequest, context: Context) -> node_pb2.DropKvResponse:
        await _refuse(context)

    async def Pull(  # type: ignore[override]
        self, requests: AsyncIterator[node_pb2.PullRequest], context: Context
    ) -> None:
        await _refuse(context)

    async def Pair(  # type: ignore[override]
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: Context
    ) -> None:
        await _refuse(context)

    async def WatchCache(  # type: ignore[override]
        self, request: node_pb2.WatchCacheRequest, context: Context
    ) -> None:
        await _refuse(context)

    # ----

    def _deliver(self, event: object) -> None:
        if not isinstance(event, SessionMessage) or not event.message.HasField("submit"):
            return
        request = event.message.submit
        accepted = decode_pb2.Accepted(key=request.key, why="scripted")
        self._sessions.send(event.session, decode_pb2.SessionResponse(accepted=accepted))
        self._batches.setdefault(event.session, []).append(request)
        if sum(map(len, self._batches.values())) == int(self._pace[0]):
            batches, self._batches = self._batches, {}
            self._stepping = asyncio.create_task(self._steps(batches))

    async def _steps(self, batches: dict[int, list[decode_pb2.SubmitRequest]]) -> None:
        steps = {session: decode_pb2.SessionResponse(step=decode_pb2.Step()) for session in batches}
        for session, batch in batches.items():
            for request in batch:
                steps[session].step.tokens.add(key=request.key, token=common_pb2.Token())
        output_tokens = next(iter(batches.values()))[0].sampling.max_tokens
        due_s = time.monotonic()
        for index in range(output_tokens):
            for session, response in steps.items():
                for step_token in response.step.tokens:
                    step_token.token.token_id = _TOKENS[(step_token.key * 7 + index) % len(_TOKENS)]
                    step_token.token.index = index
                    if index == output_tokens - 1:
                        step_token.finish_reason = common_pb2.FINISH_REASON_LENGTH
                self._sessions.send(session, _copy(response))
            due_s += self._pace[1] if index else FIRST_STEP_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        for session, batch in batches.items():
            for request in batch:
                released = decode_pb2.Released(key=request.key)
                self._sessions.send(session, decode_pb2.SessionResponse(released=released))


def _copy(response: decode_pb2.SessionResponse) -> decode_pb2.SessionResponse:
    copy = decode_pb2.SessionResponse()
    copy.CopyFrom(response)
    return copy


def serve(addresses: Connection, pace: Sequence[float]) -> None:
    """The scripted node's process."""

    async def run() -> None:
        server = grpc.aio.server(options=channel_options())
        node = ScriptedDecode(read_served_model(MODEL, None).identity, pace)
        node_pb2_grpc.add_NodeServicer_to_server(node, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(node, server)
        node.status.info.address = address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        addresses.send(address)
        await server.wait_for_termination()

    uvloop.run(run())


async def _refuse(context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this node only decodes")
    raise AssertionError("context.abort raises")
