"""Ten prefill nodes, ten decode nodes and two gateways as real processes with a tiny model, on a CPU: how soon all
pairs serve, and what each process costs while it is idle and under a trickle of requests.
"""

import asyncio
import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field

import grpc
import psutil

from baton.cli.processes import Process, Processes
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2 as pb
from baton.rpc.channels import connect
from baton.rpc.convert_node import take_unchanged
from baton.settings.config import DEMO_MODELS
from bench.table import Row
from tests.warm import launch_warm

PREFILLS, DECODES, GATEWAYS = 10, 10, 2
MEASURED_S = 20.0
TRICKLE_PER_S = 2.0
AT_ONCE = 5  # nodes of each role that are replaced together
_DEADLINE_S = 300.0
_MODEL = str(DEMO_MODELS / "llama")
_QUIET = ("--model", _MODEL, "--log-level", "error")
_NODE = (*_QUIET, "--device", "cpu", "--kv-cache-mib", "6")


@dataclass(eq=False)
class _Watched:
    """A node, and what a gateway receives from it."""

    process: Process
    on_status: Callable[[], None]
    status: pb.NodeStatus = field(default_factory=pb.NodeStatus)
    messages: int = 0
    num_bytes: int = 0

    async def follow(self) -> None:
        """Watches the node as a gateway does, until its stream ends."""
        async with connect(self.process.address) as channel:
            wanted = node_pb2.WatchRequest(interval_s=0.1, repeat_s=1.0, while_loading=True, without_unchanged=True)
            try:
                async for status in node_pb2_grpc.NodeStub(channel).Watch(wanted):
                    self.messages += 1
                    self.num_bytes += status.ByteSize()
                    take_unchanged(status, self.status)
                    self.status = status
                    self.on_status()
            except grpc.aio.AioRpcError:
                return


class _Nodes:
    """All nodes of the cluster, each at an address that it keeps when it is replaced."""

    def __init__(self, processes: Processes, tasks: asyncio.TaskGroup) -> None:
        self.processes = processes
        self.watched: dict[str, _Watched] = {}
        self._tasks = tasks
        self._reported = asyncio.Event()
        self._ports = {role: _free_ports(count) for role, count in (("prefill", PREFILLS), ("decode", DECODES))}

    def addresses(self, role: str) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports[role]]

    async def start(self, roles: Mapping[str, Sequence[str]]) -> None:
        """Starts nodes at these addresses; returns when their ports are bound."""
        started = []
        for role, addresses in roles.items():
            for address in addresses:
                name = f"{role}-{address.rpartition(':')[2]}"
                flags = (*_NODE, "--listen", address, "--name", name)
                started.append(self.processes.start(f"{role}_node", flags, name=name))
        await asyncio.to_thread(self.processes.wait_bound, started)
        for process in started:
            watched = self.watched[process.address] = _Watched(process, self._reported.set)
            self._tasks.create_task(watched.follow())

    async def replace(self, roles: Mapping[str, Sequence[str]]) -> None:
        """Drains these nodes, then starts others at their addresses."""
        ending = [self.watched[address].process for addresses in roles.values() for address in addresses]
        for process in ending:
            self.processes.running.remove(process)
            psutil.Process(process.pid).terminate()
        for process in ending:
            await asyncio.to_thread(process.popen.wait, _DEADLINE_S)
        await self.start(roles)

    @property
    def num_ready_pairs(self) -> int:
        """Number of pairs of live nodes that serve."""
        decodes = {self.watched[each].status.info.incarnation for each in self.addresses("decode")} - {0}
        return sum(
            peer.phase == pb.PEER_PHASE_READY and peer.incarnation in decodes
            for address in self.addresses("prefill")
            for peer in self.watched[address].status.peers
        )

    async def until_paired(self) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            while self.num_ready_pairs < PREFILLS * DECODES:
                self._reported.clear()
                await self._reported.wait()


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this part. Starts at most 23 processes."""
    yield from asyncio.run(_measure(progress))


async def _measure(progress: Callable[[str], None]) -> list[Row]:
    work = f"{PREFILLS} x {DECODES} real nodes, {GATEWAYS} gateways"
    rows: list[Row] = []
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(progress, launch=launch_warm))
        async with AsyncExitStack() as streams:
            tasks = await streams.enter_async_context(asyncio.TaskGroup())
            nodes = _Nodes(processes, tasks)
            every = {role: nodes.addresses(role) for role in ("prefill", "decode")}
            begun_s = time.monotonic()
            await nodes.start(every)
            gateways = [_start_gateway(processes, every) for _ in range(GATEWAYS)]
            await asyncio.to_thread(processes.wait_ready, [each.process for each in nodes.watched.values()])
            loaded_s = time.monotonic()
            await nodes.until_paired()
            rows.append(Row("cold start until all nodes are loaded", work, loaded_s - begun_s, "s"))
            rows.append(Row("from then until all 100 pairs serve", work, time.monotonic() - loaded_s, "s"))
            await asyncio.to_thread(processes.wait_ready, gateways)
            progress("idle")
            await asyncio.sleep(3.0)
            rows += await _costs(f"{work}, idle", nodes, gateways)
            progress("trickle")
            async with asyncio.TaskGroup() as trickle:
                sending = trickle.create_task(_send(gateways, MEASURED_S + 2.0))
                await asyncio.sleep(1.0)
                rows += await _costs(f"{work}, {TRICKLE_PER_S:g} requests a second", nodes, gateways)
            rows.append(Row("requests that were answered", f"{work}, trickle", sending.result(), ""))
            for first in range(0, PREFILLS, AT_ONCE):
                progress(f"replace nodes {first} to {first + AT_ONCE - 1} of each role")
                part = {role: addresses[first : first + AT_ONCE] for role, addresses in every.items()}
                await nodes.replace(part)
                started = [nodes.watched[each].process for addresses in part.values() for each in addresses]
                await asyncio.to_thread(processes.wait_ready, started)
                loaded_s = time.monotonic()
                await nodes.until_paired()
                name = f"{AT_ONCE} nodes of each role replaced: from loaded until all 100 pairs serve"
                rows.append(Row(name, work, time.monotonic() - loaded_s, "s"))
            begun_s = time.monotonic()
            await asyncio.to_thread(processes.wait_ready, [_start_gateway(processes, every)])
            rows.append(Row("a further gateway, from its start until it serves", work, time.monotonic() - begun_s, "s"))
            await asyncio.to_thread(processes.stop)
    return rows


def _start_gateway(processes: Processes, every: dict[str, list[str]]) -> Process:
    lists = (part for role, addresses in every.items() for part in (f"--{role}", ",".join(addresses)))
    return processes.start("gateway", (*_QUIET, *lists))


async def _costs(work: str, nodes: _Nodes, gateways: Sequence[Process]) -> list[Row]:
    """CPU, memory and messages of each kind of process over some seconds."""
    kinds = {
        "prefill node": [nodes.watched[each].process for each in nodes.addresses("prefill")],
        "decode node": [nodes.watched[each].process for each in nodes.addresses("decode")],
        "gateway": list(gateways),
    }
    before = {kind: _cpu_s(processes) for kind, processes in kinds.items()}
    received = [(each.messages, each.num_bytes) for each in nodes.watched.values()]
    begun_s = time.monotonic()
    await asyncio.sleep(MEASURED_S)
    passed_s = time.monotonic() - begun_s
    rows = []
    for kind, processes in kinds.items():
        percent = 100 * (_cpu_s(processes) - before[kind]) / passed_s / len(processes)
        rows.append(Row(f"CPU of a {kind}", work, percent, "% of a core"))
        private = [psutil.Process(process.pid).memory_full_info().uss >> 20 for process in processes]
        rows.append(Row(f"memory of a {kind} that it shares with no other", work, sum(private) / len(private), "MiB"))
    counts = [
        (each.messages - messages, each.num_bytes - num_bytes)
        for each, (messages, num_bytes) in zip(nodes.watched.values(), received, strict=True)
    ]
    per_node = passed_s * len(counts)
    rows.append(Row("status messages of a node to a gateway", work, sum(each for each, _ in counts) / per_node, "/s"))
    rows.append(Row("their size together", work, sum(each for _, each in counts) / per_node, "B/s"))
    return rows


def _cpu_s(processes: Sequence[Process]) -> float:
    return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes)


async def _send(gateways: Sequence[Process], seconds: float) -> int:
    """Sends short requests at an even pace; returns how many were answered."""
    answers = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(seconds * TRICKLE_PER_S)):
            url = gateways[number % len(gateways)].http
            answers.append(tasks.create_task(asyncio.to_thread(_ask, f"{url}/v1/completions", number)))
            await asyncio.sleep(1 / TRICKLE_PER_S)
    return sum(answer.result() for answer in answers)


def _ask(url: str, number: int) -> bool:
    body = json.dumps({"prompt": f"{number} words and some more of them, " * 8, "max_tokens": 8}).encode()
    wanted = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(wanted, timeout=_DEADLINE_S) as answer:
        return bool(json.load(answer)["choices"])


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
