"""Messages of callers without a key are read one at a time, one host after the other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded, Unauthenticated
from baton.rpc.channels import connect
from baton.rpc.guard import ClientGuard
from baton.rpc.secure_server import Protection
from baton.rpc.server import GrpcServer
from baton.rpc.status import from_rpc_error
from baton.rpc.unauthenticated import ReadTurns
from baton.security.authenticator import Authenticator
from baton.security.keys import entry, new_key
from baton.security.tls import Dial
from tests.unit.security.settings import AuthenticatorSettings

DEADLINE_S = 60.0
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
LARGE = bytes(1 << 20)


class Readers:
    """Calls that take turns, each until the test lets it go on."""

    def __init__(self, turns: ReadTurns) -> None:
        self.turns = turns
        self.order: list[str] = []
        self._go_on = asyncio.Event()

    async def start(self, name: str) -> "asyncio.Task[None]":
        """Starts a call whose name begins with its host's letter; returns once it has a turn, waits or is refused."""
        task = asyncio.create_task(self._read(name))
        await asyncio.sleep(0)
        return task

    def let_go(self) -> None:
        self._go_on.set()

    async def _read(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.order.append(name)
            await self._go_on.wait()


async def test_hosts_take_turns_however_many_calls_one_of_them_has() -> None:
    readers = Readers(ReadTurns())
    calls = [await readers.start(name) for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")]
    assert readers.order == ["a1"]
    readers.let_go()
    await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S)
    assert readers.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_the_host_with_most_waiting_calls_is_refused_first() -> None:
    readers = Readers(ReadTurns(waiting_max=3))
    calls = {name: await readers.start(name) for name in ("a1", "a2", "a3", "a4", "a5", "b1", "b2")}
    readers.let_go()
    await asyncio.wait(calls.values())
    refused = {name for name, call in calls.items() if isinstance(call.exception(), Overloaded)}
    assert refused == {"a4", "a5", "b2"}
    assert readers.order == ["a1", "a2", "b1", "a3"]


@pytest.mark.parametrize("chosen", [False, True])
async def test_a_call_that_is_cancelled_leaves_its_turn_to_the_next(chosen: bool) -> None:
    """Also if it has just been chosen."""
    readers = Readers(ReadTurns())
    first, second, third = [await readers.start(name) for name in ("a1", "b1", "c1")]
    if chosen:
        first.cancel()
        await asyncio.sleep(0)
        assert readers.order == ["a1"]
    second.cancel()
    readers.let_go()
    await asyncio.wait([first, second])
    await asyncio.wait_for(third, DEADLINE_S)
    assert readers.order[-1] == "c1"
    await asyncio.wait_for(await readers.start("d1"), DEADLINE_S)


@asynccontextmanager
async def locked_server(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Yields the address of a server that wants keys and has the health service, and a key."""
    key = new_key()
    (folder / "keys.toml").write_text(entry("alice", key, operator=False))
    door = Authenticator(AuthenticatorSettings(api_keys=folder / "keys.toml"))
    async with GrpcServer(
        "127.0.0.1:0", advertise=None, protection=Protection(None, ClientGuard(door)), bounded=True
    ) as server:
        await server.start([])
        yield server.address, key


async def error_of(call: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, DEADLINE_S)
    return from_rpc_error(caught.value)


async def test_health_needs_no_key(tmp_path: Path) -> None:
    async with locked_server(tmp_path) as (address, _), connect(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answers = await asyncio.gather(*(stub.Check(health_pb2.HealthCheckRequest()) for _ in range(8)))
        assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}
        watching = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        assert (await stub.List(health_pb2.HealthListRequest())).statuses  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", [CHECK, WATCH])
async def test_a_caller_without_a_key_gets_no_large_message_in(tmp_path: Path, method: str) -> None:
    async with locked_server(tmp_path) as (address, key):
        async with connect(address) as channel:
            call: Any = channel.unary_unary if method == CHECK else channel.unary_stream
            error = await error_of(first_of(call(method)(LARGE)))
            assert isinstance(error, InvalidRequest)
            assert "4096" in str(error)
        async with connect(address, dial=Dial(metadata=(("authorization", f"Bearer {key}"),))) as channel:
            call = channel.unary_unary(CHECK)
            error = await error_of(call(LARGE))
            assert isinstance(error, InvalidRequest)
            assert "4096" not in str(error)


async def first_of(call: Any) -> Any:
    return await (call.read() if hasattr(call, "read") else call)


async def test_a_message_that_never_comes_ends_the_call_and_not_the_next(tmp_path: Path) -> None:
    async with locked_server(tmp_path) as (address, _), connect(address) as channel:
        make: Callable[..., Any] = channel.stream_unary
        silent = make(CHECK)(timeout=DEADLINE_S)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert isinstance(await error_of(silent), DeadlineExceeded)


async def test_a_call_without_a_key_is_refused_before_its_message(tmp_path: Path) -> None:
    """The client sends none, and gets its answer."""
    async with locked_server(tmp_path) as (address, _), connect(address) as channel:
        make: Callable[..., Any] = channel.stream_unary
        error = await error_of(make("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(timeout=DEADLINE_S))
        assert isinstance(error, Unauthenticated)
