"""The Pool call of a real prefill node: its results, its refusals, its end."""

import asyncio

import grpc
import numpy as np
import pytest

from baton.core.errors import Draining, InvalidRequest
from baton.node.waiting import until
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.rpc.status import from_rpc_error
from tests.unit.prefill_node.test_service import served


def prompt_of(length: int, start: int | None = None) -> pb.PoolPrompt:
    first = length - 1 if start is None else start
    return pb.PoolPrompt(token_ids=range(10, 10 + length), token_start=first, token_stop=length)


async def test_prompts_of_one_call_come_back_in_order_and_hold_nothing() -> None:
    lengths = (1, 7, 30, 2)
    async with served() as (_, service, stub):
        response = await stub.Pool(pb.PoolRequest(request_id="a", prompts=map(prompt_of, lengths)))
        vectors = [np.frombuffer(each.values, "<f4") for each in response.pooled]
        for length, vector in zip(lengths, vectors, strict=True):
            alone = await stub.Pool(pb.PoolRequest(prompts=[prompt_of(length)], cache_salt="other"))
            assert vector == pytest.approx(np.frombuffer(alone.pooled[0].values, "<f4"), abs=1e-5)
        assert response.queue_s >= 0
        assert response.pool_s > 0
        again = await stub.Pool(pb.PoolRequest(prompts=[prompt_of(30), prompt_of(30, 0)]))
        assert [each.cached_tokens for each in again.pooled] == [16, 0]
        assert not service.busy


async def test_a_wrong_prompt_ends_the_call_with_its_reason() -> None:
    async with served() as (*_, stub):
        for wrong in (pb.PoolPrompt(), prompt_of(3, 3), pb.PoolPrompt(token_ids=[1], token_stop=1, classify=True)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Pool(pb.PoolRequest(prompts=[prompt_of(5), wrong]))
            assert isinstance(from_rpc_error(caught.value), InvalidRequest)


async def test_a_cancelled_call_frees_its_blocks_and_a_draining_node_refuses() -> None:
    async with served() as (_, service, stub):
        call = stub.Pool(pb.PoolRequest(prompts=[prompt_of(300, 0)] * 20))
        assert await until(lambda: service.busy, timeout_s=120.0)
        call.cancel()
        assert await until(lambda: not service.busy, timeout_s=120.0)
        running = asyncio.ensure_future(stub.Pool(pb.PoolRequest(prompts=[prompt_of(300, 0)])))
        assert await until(lambda: service.busy, timeout_s=120.0)
        service.stop_admission()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Pool(pb.PoolRequest(prompts=[prompt_of(5)]))
        assert isinstance(from_rpc_error(caught.value), Draining)
        assert len((await running).pooled) == 1
