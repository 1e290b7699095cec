"""`baton drop-kv` asks gateways to drop what its arguments name, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.cli.drop_kv import drop_kv
from baton.core.errors import InvalidRequest
from baton.protos.v1 import operations_pb2 as pb
from baton.protos.v1 import operations_pb2_grpc


class Gateway(operations_pb2_grpc.OperationsServicer):
    """Has one node, which drops everything that it is asked to."""

    def __init__(self) -> None:
        self.asked: list[pb.DropKvRequest] = []

    async def DropKv(self, request: pb.DropKvRequest, context: object) -> pb.DropKvResponse:  # noqa: N802
        self.asked.append(request)
        return pb.DropKvResponse(nodes=[pb.NodeKvDrop(name="decode-0", blocks=3)])


@asynccontextmanager
async def gateways() -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway and its address."""
    gateway, server = Gateway(), grpc.aio.server()  # type: ignore[abstract]  # the other calls are not implemented
    operations_pb2_grpc.add_OperationsServicer_to_server(gateway, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield gateway, target
    finally:
        await server.stop(None)


async def test_each_revision_of_an_adapter_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter that was trained again has KV of each of its revisions."""
    async with gateways() as (gateway, target):
        await asyncio.to_thread(drop_kv, "ours", adapter=["sql=r1", "sql=r2", "law=r1"], target=target)
    (asked,) = gateway.asked
    assert {(each.name, each.revision) for each in asked.adapters} == {("sql", "r1"), ("sql", "r2"), ("law", "r1")}
    assert capsys.readouterr().out == "decode-0: dropped cache 3 blocks\n"


async def test_an_empty_salt_must_be_meant() -> None:
    """A shell's unset variable is one too, and would drop the KV of everybody who gives no salt."""
    async with gateways() as (gateway, target):
        with pytest.raises(InvalidRequest, match="the cache salt is empty") as refused:
            await asyncio.to_thread(drop_kv, "", target=target)
        assert refused.value.field == "cache_salt"
        assert gateway.asked == []
        await asyncio.to_thread(drop_kv, "", no_salt=True, target=target)
        await asyncio.to_thread(drop_kv, "", client="alice", target=target)
    assert [(asked.cache_salt, asked.client) for asked in gateway.asked] == [("", ""), ("", "alice")]


async def test_a_salt_and_its_absence_together_are_refused() -> None:
    async with gateways() as (gateway, target):
        with pytest.raises(InvalidRequest, match="both"):
            await asyncio.to_thread(drop_kv, "ours", no_salt=True, target=target)
    assert gateway.asked == []
