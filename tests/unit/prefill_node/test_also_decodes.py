"""Both services of a prefill node over one engine: each gets its own requests' events, and room that the other left."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.core.errors import BatonError, Draining, InternalError
from baton.node.assembly import Node
from baton.node.role_services import RoleServices
from baton.node.waiting import until
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc, prefill_pb2_grpc
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.rpc.channels import channel_options
from baton.rpc.error_detail import from_detail
from baton.rpc.status import from_rpc_error
from prefill_node.service import PrefillService
from tests.unit.prefill_node.nodes import (
    PROMPT,
    ScriptedDecodeNode,
    decode_node,
    pause_steps,
    prefill_node,
    prefill_settings,
)

DEADLINE_S = 60.0


@dataclass
class Whole:
    """A request of the Decode service."""

    key: int
    kinds: list[str] = field(default_factory=list)
    tokens: list[tuple[int, float]] = field(default_factory=list)
    error: BatonError | None = None


class Clients:
    """A gateway's streams to both services of one node."""

    def __init__(self, node: Node, service: PrefillService, channel: grpc.aio.Channel) -> None:
        self.node = node
        self.allow_steps = pause_steps(node)
        self.allow_steps(math.inf)
        self.service = service
        self._prefill = prefill_pb2_grpc.PrefillStub(channel)
        self._requests: dict[int, Whole] = {}
        self.session = decode_pb2_grpc.DecodeStub(channel).Session()
        self._reading = asyncio.create_task(self._read())

    async def submit(self, num_tokens: int, *, max_tokens: int = 8) -> Whole:
        whole = Whole(len(self._requests) + 1)
        self._requests[whole.key] = whole
        submit = pb.SubmitRequest(
            key=whole.key,
            prompt_token_ids=PROMPT[:num_tokens],
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0),
            placement=pb.PLACEMENT_LOCAL,
            prefill_available=True,
            max_queue_s=DEADLINE_S,
        )
        await self.session.write(pb.SessionRequest(submit=submit))
        return whole

    async def _read(self) -> None:
        async for response in self.session:
            kind = str(response.WhichOneof("message"))
            for token in response.step.tokens:
                self._requests[token.key].tokens.append((token.token.token_id, token.token.logprob))
            if kind != "step":
                message = getattr(response, kind)
                whole = self._requests[message.key]
                whole.kinds.append(kind)
                if kind == "failed":
                    whole.error = from_detail(message.error)

    async def call(self, decode: ScriptedDecodeNode, lease: int, *, on_progress: "asyncio.Event | None" = None) -> None:
        """A whole Prefill call.

        Raises:
            BatonError: the call's error.
        """
        try:
            async for event in self._prefill.Prefill(await decode.request(lease)):
                if on_progress is not None and event.HasField("progress"):
                    on_progress.set()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def begun(self, decode: ScriptedDecodeNode, lease: int, *, steps: int) -> "asyncio.Task[None]":
        """A call that has computed a part of its prompt in so many steps, after which the engine starts no other."""
        self.allow_steps(0)
        begun = asyncio.Event()
        call = asyncio.create_task(self.call(decode, lease, on_progress=begun))
        await holds(lambda: self.node.engine.load().tokens_waiting >= len(PROMPT))
        self.allow_steps(steps)
        await asyncio.wait_for(begun.wait(), DEADLINE_S)
        return call

    async def close(self) -> None:
        self.session.cancel()
        await asyncio.wait([self._reading])


@asynccontextmanager
async def clients(**values: object) -> AsyncIterator[Clients]:
    settings = prefill_settings(**values)
    node = prefill_node(settings)
    service = PrefillService(node, settings)
    server = grpc.aio.server(options=channel_options())
    port = server.add_insecure_port("127.0.0.1:0")
    services = RoleServices(node.name)
    services.serve(node.name, service.servicers)
    services.add_to(server)
    async with node, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await server.start()
        opened = Clients(node, service, channel)
        try:
            yield opened
        finally:
            await service.close()
            await opened.close()
            await server.stop(grace=None)
        load = node.engine.load()
        assert load.blocks_free == load.blocks_total, "I1"
        assert not service.busy


async def holds(condition: Callable[[], bool]) -> None:
    assert await until(condition, timeout_s=DEADLINE_S)


async def test_a_request_that_waits_for_room_gets_what_a_prompt_has_left() -> None:
    async with decode_node() as decode, clients(max_batch_tokens=16, num_blocks=32) as both:
        call = await both.begun(decode, 1, steps=3)  # 25 blocks
        whole = await both.submit(150)

        def waiting() -> int:
            status = node_status_pb2.NodeStatus()
            both.service.fill_status(status, {})
            return status.requests_waiting

        await holds(lambda: waiting() == 1)
        both.allow_steps(math.inf)
        await call
        await holds(lambda: "released" in whole.kinds)
        assert whole.kinds == ["accepted", "released"]
        assert len(whole.tokens) == 8


async def test_a_step_that_fails_fails_both_kinds_and_nothing_stays_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async with decode_node() as decode, clients(max_batch_tokens=16) as both:
        both.allow_steps(20)
        whole = await both.submit(20, max_tokens=500)
        await holds(lambda: bool(whole.tokens))
        call = await both.begun(decode, 1, steps=20)

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("the test's device is broken")

        monkeypatch.setattr(both.node.built.runner, "launch", fail)
        both.allow_steps(math.inf)
        with pytest.raises(InternalError, match="device is broken"):
            await call
        await holds(lambda: "released" in whole.kinds)
        assert whole.kinds == ["accepted", "failed", "released"]
        assert isinstance(whole.error, InternalError)
        assert (await decode.message("quiet")).quiet.lease == 1
        monkeypatch.undo()
        again = await both.submit(20)
        await holds(lambda: "released" in again.kinds)
        assert len(again.tokens) == 8


async def test_closing_ends_both_kinds() -> None:
    async with decode_node() as decode, clients() as both:
        both.allow_steps(20)
        whole = await both.submit(20, max_tokens=500)
        await holds(lambda: bool(whole.tokens))
        call = await both.begun(decode, 1, steps=60)
        assert both.service.busy
        await both.service.close()
        with pytest.raises(Draining):
            await call
        await holds(lambda: "released" in whole.kinds)
        assert whole.error is None, "its gateway continues it elsewhere"


async def test_draining_refuses_both_kinds_and_waits_for_those_that_run() -> None:
    async with decode_node() as decode, clients() as both:
        whole = await both.submit(20, max_tokens=30)
        call = await both.begun(decode, 1, steps=60)
        both.service.stop_admission()
        both.allow_steps(math.inf)
        refused = await both.submit(20)
        with pytest.raises(Draining):
            await both.call(decode, 2)
        await holds(lambda: "released" in refused.kinds)
        assert isinstance(refused.error, Draining)
        await call
        await holds(lambda: "released" in whole.kinds)
        assert len(whole.tokens) == 30
        await holds(lambda: not both.service.busy)


async def test_batch_invariant_logits_do_not_depend_on_prompts_for_others() -> None:
    values = {"batch_invariant": True, "prefix_cache": False, "max_batch_tokens": 200, "max_batch_requests": 16}
    async with decode_node(batch_invariant=True) as decode, clients(**values) as both:
        alone = await both.submit(200)
        await holds(lambda: "released" in alone.kinds)
        calls = [asyncio.create_task(both.call(decode, lease)) for lease in (1, 2)]
        next_to_them = await both.submit(200)
        await asyncio.gather(*calls)
        await holds(lambda: "released" in next_to_them.kinds)
        assert next_to_them.tokens == alone.tokens
