"""The Decode service over gRPC on a real node: its streams, its part of the status, and how it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.core.errors import PeerRefused
from baton.engine.build import BuiltRunner
from baton.node.role_services import RoleServices
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.rpc.channels import channel_options
from baton.rpc.status import from_rpc_error
from decode_node.driver import DecodeDriver
from decode_node.service import DecodeService
from tests.unit.decode_node.nodes import decode_node, decode_settings, load_demo
from tests.unit.decode_node.streams import DEADLINE_S, until

Session = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


@pytest.fixture(scope="module")
def built() -> BuiltRunner:
    return load_demo()


@asynccontextmanager
async def served(
    built: BuiltRunner,
) -> "AsyncIterator[tuple[DecodeDriver, DecodeService, decode_pb2_grpc.DecodeAsyncStub]]":
    settings = decode_settings()
    node = decode_node(built, settings)
    driver = DecodeDriver(node, settings)
    service = DecodeService(driver)
    server = grpc.aio.server(options=channel_options())
    services = RoleServices(node.name)
    services.serve(node.name, service.servicers)
    services.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    async with node:
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield driver, service, decode_pb2_grpc.DecodeStub(channel)
        await service.close()
        await server.stop(grace=1.0)


def submission(key: int, policy: pb.LocalPolicy.ValueType) -> pb.SessionRequest:
    sampling = common_pb2.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    submit = pb.SubmitRequest(
        key=key,
        prompt_token_ids=range(3, 90),
        sampling=sampling,
        policy=policy,
        prefill_available=True,
        max_queue_s=30.0,
    )
    return pb.SessionRequest(submit=submit)


async def read(session: Session) -> pb.SessionResponse:
    response = await session.read()
    assert isinstance(response, pb.SessionResponse)
    return response


async def test_a_gateway_gets_its_tokens_and_then_released(built: BuiltRunner) -> None:
    async with served(built) as (_, service, stub), asyncio.timeout(DEADLINE_S):
        session = stub.Session()
        await session.write(submission(1, pb.LOCAL_POLICY_LOCAL))
        kinds: list[str | None] = []
        tokens = 0
        while kinds[-1:] != ["released"]:
            response = await read(session)
            kinds.append(response.WhichOneof("message"))
            tokens += len(response.step.tokens)
        assert (kinds[0], tokens) == ("accepted", 3)
        assert not service.busy


async def test_the_status_counts_requests_that_wait_for_blocks(built: BuiltRunner) -> None:
    async with served(built) as (driver, service, stub), asyncio.timeout(DEADLINE_S):
        session = stub.Session()
        for key in range(20):  # 6 blocks each, of 64
            await session.write(submission(key, pb.LOCAL_POLICY_STRICT))
        for _ in range(10):
            assert (await read(session)).HasField("reserved")
        status = node_status_pb2.NodeStatus(requests_waiting=2, blocks_open=[33, 31])
        await until(lambda: driver.machine.waiting == 10)
        service.fill_status(status, {})
        assert status.requests_waiting == 12
        assert sum(status.blocks_open) == 64 - 10 * 6, "they get their blocks before those that come now"
        assert service.busy


async def test_a_cancelled_session_gives_everything_back(built: BuiltRunner) -> None:
    async with served(built) as (_, service, stub), asyncio.timeout(DEADLINE_S):
        session = stub.Session()
        await session.write(submission(1, pb.LOCAL_POLICY_STRICT))
        await read(session)
        assert service.busy
        session.cancel()
        await until(lambda: not service.busy)


async def test_a_draining_node_refuses_and_a_closed_one_ends_its_streams(built: BuiltRunner) -> None:
    async with served(built) as (_, service, stub), asyncio.timeout(DEADLINE_S):
        session = stub.Session()
        await session.write(submission(1, pb.LOCAL_POLICY_STRICT))
        assert (await read(session)).HasField("reserved")
        service.stop_admission()
        await session.write(submission(2, pb.LOCAL_POLICY_STRICT))
        refused = await read(session)
        assert refused.failed.error.reason == common_pb2.ERROR_REASON_DRAINING
        assert (await read(session)).released.key == 2
        await service.close()
        assert (await read(session)).released.key == 1
        assert await session.read() is grpc.aio.EOF


async def test_a_pair_that_is_refused_gets_the_typed_error(built: BuiltRunner) -> None:
    async with served(built) as (_, _, stub), asyncio.timeout(DEADLINE_S):
        call = stub.Pair()
        await call.write(pb.PairRequest(quiet=pb.Quiet(lease=1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert isinstance(from_rpc_error(refused.value), PeerRefused)
