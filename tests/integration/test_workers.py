"""`gateway --workers`: several processes on one port answer as one gateway, and one that crashes is replaced."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest

from baton.cli.processes import Process, Processes
from baton.core.errors import ConfigError
from baton.gateway.process.worker_count import GatewayHost, choose_workers
from baton.gateway.text.model import read_served_model
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1 import operations_pb2
from baton.protos.v1.generation_pb2_grpc import GenerationStub
from baton.protos.v1.operations_pb2_grpc import OperationsStub
from baton.rpc.channels import connect
from baton.rpc.server import ListenAddress, why_taken
from baton.rpc.sockets import bind
from baton.settings.config import DEMO_MODELS
from baton.settings.gateway_config import GatewaySettings

if TYPE_CHECKING:
    from baton.protos.v1.generation_pb2_grpc import GenerationAsyncStub
    from baton.protos.v1.operations_pb2_grpc import OperationsAsyncStub
from tests.integration.cluster import DEADLINE_S, Machines
from tests.unit.gateway.scripted_nodes import scripted_nodes

pytestmark = pytest.mark.slow

ENDED = {"r1": "cancelled", "r2": "refused"}


class Workers:
    """A channel to each worker of a gateway."""

    def __init__(self, gateway: Process, channels: AsyncExitStack, key: str) -> None:
        self.gateway = gateway
        self.metadata = (("authorization", f"Bearer {key}"),)
        self.stubs: dict[int, GenerationAsyncStub] = {}  # by pid
        self.operations: dict[int, OperationsAsyncStub] = {}
        self._channels = channels

    @property
    def pids(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.gateway.pid).children()}

    async def reach(self, pids: set[int]) -> None:
        """Connects until there is a channel to each of these; the kernel chooses where a connection goes."""
        async with asyncio.timeout(DEADLINE_S):
            while not pids <= self.stubs.keys():
                channel = await self._channels.enter_async_context(connect(self.gateway.address))
                stub = GenerationStub(channel)
                before = {pid: _connections(pid, self.gateway.address) for pid in pids}
                await stub.ListModels(pb.ListModelsRequest(), wait_for_ready=True, metadata=self.metadata)
                for pid, count in before.items():
                    if _connections(pid, self.gateway.address) > count:
                        self.stubs[pid], self.operations[pid] = stub, OperationsStub(channel)

    async def until(
        self, pid: int, condition: Callable[[operations_pb2.ClusterStatusResponse], bool]
    ) -> operations_pb2.ClusterStatusResponse:
        """Asks this worker until what it knows of the gateway fulfils the condition."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                asked = operations_pb2.ClusterStatusRequest()
                status = await self.operations[pid].ClusterStatus(asked, metadata=self.metadata)
                if condition(status):
                    return status
                await asyncio.sleep(0.01)


@asynccontextmanager
async def workers(
    start: Machines, *, key: str = "", decodes: int = 1, **flags: Any
) -> AsyncIterator[tuple[Workers, Process]]:
    decode, *more = start.nodes(*[("decode", {})] * decodes, paused_engine=("decode",))
    gateway = start.gateway([], [decode, *more], workers=2, local_policy="local", **flags)
    async with AsyncExitStack() as channels:
        found = Workers(gateway, channels, key)
        await found.reach(found.pids)
        for pid in found.stubs:
            await found.until(pid, lambda status: all(node.reachable for node in status.nodes))
        yield found, decode


def _connections(pid: int, address: str) -> int:
    """How many clients this process has at the address."""
    port = int(address.rpartition(":")[2])
    sockets = psutil.Process(pid).net_connections(kind="tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in sockets)


def _read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def generate(
    stub: "GenerationAsyncStub", request_id: str, metadata: tuple[tuple[str, str], ...] = ()
) -> "asyncio.Task[list[pb.GenerateResponse]]":
    request = pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=range(1, 20)))
    request.sampling.max_tokens = 4

    async def collect() -> list[pb.GenerateResponse]:
        return [message async for message in stub.Generate(request, metadata=metadata)]

    return asyncio.create_task(collect())


async def test_any_worker_answers_for_the_whole_gateway(start: Machines) -> None:
    async with workers(start, max_concurrent_requests=1) as (found, _):
        one, other = found.stubs
        running = generate(found.stubs[one], "r1")
        await found.until(other, lambda status: status.requests_running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(found.stubs[other], "r2")
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        loads = await found.operations[other].GetLoads(operations_pb2.GetLoadsRequest())
        assert loads.requests_running == 1
        metrics = await asyncio.to_thread(_read, f"{found.gateway.http}/metrics")
        assert 'baton_num_requests_running{model_name="llama",role="gateway"} 1.0\n' in metrics
        aborted = await found.stubs[other].Abort(pb.AbortRequest(request_ids=["r1", "unknown"]))
        assert list(aborted.aborted) == ["r1"]
        with pytest.raises(grpc.aio.AioRpcError) as cancelled:
            await running
        assert cancelled.value.code() == grpc.StatusCode.CANCELLED
        for pid, operations in found.operations.items():
            await found.until(pid, lambda status: status.requests_running == 0)
            await until_shown(operations, ENDED)
        series = 'baton_requests_total{{model_name="llama",outcome="{}",role="gateway"}} {}.0\n'
        ended = [series.format(*each) for each in (("cancelled", 1), ("refused", 1), ("failed", 0))]
        async with asyncio.timeout(DEADLINE_S):
            while True:
                page = await asyncio.to_thread(_read, f"{found.gateway.http}/metrics")
                if all(each in page for each in ended):
                    break


async def until_shown(operations: "OperationsAsyncStub", outcomes: dict[str, str]) -> None:
    """Returns when a worker shows these outcomes, by request: it asks the others, and shows an answer for a second."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            shown = json.loads((await operations.ClusterView(operations_pb2.ClusterViewRequest())).state_json)
            if {each["request_id"]: each["outcome"] for each in shown["requests"]} == outcomes:
                return
            await asyncio.sleep(0.05)


async def test_the_limits_of_a_client_hold_for_all_workers_together(start: Machines, tmp_path: Path) -> None:
    file, key = tmp_path / "keys.toml", "a key of a client"
    digest = hashlib.sha256(key.encode()).hexdigest()
    file.write_text(f'[keys.ann]\nsha256 = "{digest}"\noperator = true\nrequests_per_minute = 3\nconcurrent = 1\n')
    async with workers(start, key=key, api_keys=file) as (found, _):
        (one, first), (_, second) = found.stubs.items()
        began_s = time.monotonic()
        running = generate(first, "r1", metadata=found.metadata)
        await found.until(one, lambda status: status.requests_running == 1)
        asked = pb.TokenizeRequest(text="a")
        with pytest.raises(grpc.aio.AioRpcError, match="1 requests at once"):
            await second.Tokenize(asked, metadata=found.metadata)
        await second.Abort(pb.AbortRequest(request_ids=["r1"]), metadata=found.metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            await running

        async def refusal(stub: "GenerationAsyncStub") -> str:
            """Why a worker refuses one more request; empty if it serves it."""
            try:
                await stub.Tokenize(asked, metadata=found.metadata)
            except grpc.aio.AioRpcError as error:
                return str(error.details())
            return ""

        reasons = [await refusal(stub) for stub in (first, second)]
        while not all(reasons[-2:]):
            reasons += [await refusal(stub) for stub in (first, second)]
        assert all("3 requests per minute" in reason for reason in reasons if reason)
        # One comes back every 20 s. With a limit for each worker, six are served.
        served = 1 + reasons.count("")
        assert 3 <= served <= 3 + (time.monotonic() - began_s) / 20


async def test_a_session_stays_on_its_node_at_any_worker(start: Machines) -> None:
    async with workers(start, decodes=2) as (found, _):
        start.let_all_go()
        one, other = found.stubs
        nodes: dict[str, str] = {}
        for session in "abcdef":
            await found.until(one, partial(_all_idle, len(nodes)))
            nodes[session] = await served_on(found.stubs[one], session)
        assert len(set(nodes.values())) == 2
        again: dict[str, str] = {}
        for session in "fedcba":  # in the first order, idle nodes that take turns would lead them to the same nodes
            await found.until(other, partial(_all_idle, len(nodes) + len(again)))
            again[session] = await served_on(found.stubs[other], session)
        assert again == nodes


def _all_idle(served: int, status: operations_pb2.ClusterStatusResponse) -> bool:
    """Whether the nodes have reported the end of so many requests."""
    statuses = [node.status for node in status.nodes]
    busy = any(each.requests_running or each.requests_waiting for each in statuses)
    return not busy and sum(each.requests_total for each in statuses) == served


async def served_on(stub: "GenerationAsyncStub", session: str) -> str:
    """The node that served a request of the session; its prompt is shorter than a block, so no node has cached it."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1, 9)), session_id=session)
    request.sampling.max_tokens = 2
    messages = [message async for message in stub.Generate(request)]
    return messages[-1].receipt.decode_node


async def test_each_worker_reports_the_load_of_all(start: Machines) -> None:
    async with workers(start) as (found, decode):
        one, other = found.stubs
        start.let_go(decode)
        over = asyncio.Event()

        async def serve() -> None:
            """A rate is that of the last seconds, so requests come until it is seen."""
            while not over.is_set():
                await generate(found.stubs[one], "")

        serving = asyncio.create_task(serve())
        for pid in (one, other):
            status = await found.until(pid, lambda status: sum(each.tokens_per_s for each in status.workers) > 0)
            assert len(status.workers) == 2
            assert all(0 <= each.busy_share <= 1 for each in status.workers)
        over.set()
        await serving


async def test_a_gateway_without_the_setting_starts_as_many_workers_as_suit_the_machine(start: Machines) -> None:
    async with scripted_decode() as decode:
        gateway = await asyncio.to_thread(start.gateway, [], [decode], local_policy="local", workers="auto")
        suit = choose_workers(GatewayHost.of_this_process(GatewaySettings(decode=decode.address))).workers
        async with connect(gateway.address) as channel:
            status = await OperationsStub(channel).ClusterStatus(operations_pb2.ClusterStatusRequest())
        assert len(status.workers) == suit
        children = psutil.Process(gateway.pid).children()
        assert sum("baton.gateway.process.worker" in child.cmdline() for child in children) == (suit if suit > 1 else 0)


async def test_a_crashed_worker_is_replaced_and_the_others_drain(start: Machines) -> None:
    async with workers(start) as (found, decode):
        one, other = found.stubs
        lost, kept = generate(found.stubs[one], "lost"), generate(found.stubs[other], "kept")
        await found.until(other, lambda status: status.requests_running == 2)
        psutil.Process(one).kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await lost
        await found.until(other, lambda status: status.requests_failed == 1 and status.requests_running == 1)
        await found.until(other, lambda _: len(found.pids) == 2 and one not in found.pids)
        await found.reach(found.pids)
        psutil.Process(found.gateway.pid).terminate()
        start.let_go(decode)
        messages = await kept
        assert sum(len(message.tokens) for message in messages) == 4
        assert await asyncio.to_thread(found.gateway.popen.wait, DEADLINE_S) == 0


@asynccontextmanager
async def scripted_decode() -> AsyncIterator[Process]:
    """A decode node without a process of its own."""
    async with scripted_nodes(read_served_model(DEMO_MODELS / "llama", None).identity) as (_, decode):
        own = psutil.Popen(["true"])
        own.wait()
        yield Process("decode_node", "scripted", own, address=decode.address)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_workers_end_with_a_parent_that_is_killed_and_leave_their_ports(start: Machines) -> None:
    async with scripted_decode() as decode:
        gateway = await asyncio.to_thread(start.gateway, [], [decode], workers=2, local_policy="local")
        workers = {child.pid for child in psutil.Process(gateway.pid).children()}
        assert len(workers) == 2
        await asyncio.to_thread(start.kill, gateway)
        async with asyncio.timeout(DEADLINE_S):
            while not all(map(_has_ended, workers)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while why_taken(ListenAddress.parse(gateway.address, field="listen")) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_ended_connections_of_a_gateway_with_one_process_do_not_hold_its_port(start: Machines) -> None:
    listening = bind("127.0.0.1:0", field="metrics_listen")
    assert listening is not None
    listening.setblocking(True)
    port = listening.getsockname()[1]
    with listening, socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = listening.accept()
        accepted.close()  # this side closes first, so the kernel keeps the connection for a minute
        assert await asyncio.to_thread(client.recv, 1) == b""
    async with scripted_decode() as decode:
        listen = f"127.0.0.1:{port}"
        await asyncio.to_thread(start.gateway, [], [decode], workers=2, local_policy="local", metrics_listen=listen)


async def test_a_ready_file_that_cannot_be_written_ends_the_gateway(start: Machines) -> None:
    async with scripted_decode() as decode:
        with pytest.raises(ConfigError, match="exit code 2"):
            await asyncio.to_thread(
                start.gateway, [], [decode], workers=2, local_policy="local", ready_file="/no/such/folder/ready"
            )


def test_sigterm_ends_a_gateway_that_still_looks_for_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_hub, Processes(lambda _: None) as processes:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_hub.getsockname()[1]}")
        flags = ["--model", "owner/model", "--workers", "2", "--decode", "127.0.0.1:1"]
        gateway = processes.start("gateway", [*flags, "--listen", "127.0.0.1:0", "--http-listen", "off"])
        processes.wait_bound([gateway])
        with silent_hub.accept()[0]:  # it asks, and waits for the answer
            os.kill(gateway.pid, signal.SIGTERM)
            assert gateway.popen.wait(DEADLINE_S) == -signal.SIGTERM
