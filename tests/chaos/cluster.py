"""The processes of a run and the network between them. Processes start again at the addresses that they had.

Every connection over gRPC goes through a `proxy.Link`; KV goes over UCX, which shares memory on one machine.
"""

import asyncio
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import psutil

from baton.cli.processes import Process, Processes
from baton.node.waiting import until
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from tests.chaos.history import Crashed, History, Measured
from tests.chaos.scenario import CLIENT, PAIRS, Scenario
from tests.integration.cluster import LLAMA, Flags, arguments
from tests.link import Link
from tests.warm import launch_warm

PROGRAMS = {"p": "prefill_node", "d": "decode_node", "g": "gateway"}
_POLL_S = 0.05
_MIB = 1 << 20
_LOG_TAIL = 2000
_HOST_CACHE_GIB = 0.01  # 27 entries of 64 tokens
_NODE: Flags = {
    "model": LLAMA, "device": "cpu", "num_blocks": 200, "max_batch_tokens": 64, "segment_mib": 0.05, "keepalive_s": 3,
    "drain_grace_s": 4,
}  # fmt: skip
_FLAGS: dict[str, Flags] = {
    "p": {**_NODE, "connect_timeout_s": 8},
    "d": {**_NODE, "lease_s": 20, "local_prefill_tokens": 32},
    "g": {
        "model": LLAMA, "http_listen": "off", "drain_grace_s": 4, "prefill_stall_s": 4, "decode_stall_s": 6,
        "max_queue_s": 30, "failover_wait_s": 60,
    },
}  # fmt: skip


@dataclass
class Member:
    """One process of the cluster, through all of its lives.

    Attributes:
        address: where it listens, in each life.
        flags: of each life.
        expected: it may be gone, because a fault has it; else its end is a crash.
        lives: how often it has started.
    """

    name: str
    address: str
    flags: Flags
    process: Process | None = None
    expected: bool = False
    lives: int = 0

    @property
    def running(self) -> Process:
        assert self.process is not None
        return self.process

    @property
    def role(self) -> str:
        return {"p": "prefill", "d": "decode", "g": "gateway"}[self.name[0]]

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.popen.poll() is not None


@dataclass
class Cluster:
    """The processes of a run, and the links between them.

    Attributes:
        members: by name.
        links: by name.
        logs: a directory for the output of each life of each process.
    """

    processes: Processes
    history: History
    logs: Path
    members: dict[str, Member] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)

    @property
    def kept(self) -> Path:
        """The directory of the nodes' files of KV."""
        return self.logs / "kv"

    # ---- processes

    def nodes(self) -> list[Member]:
        return [member for member in self.members.values() if member.role != "gateway"]

    def gateways(self) -> list[Member]:
        return [member for member in self.members.values() if member.role == "gateway"]

    def start(self, *names: str, prepare: Callable[[], None] | None = None) -> None:
        """Starts processes; `until_ready` waits for them."""
        for name in names:
            member = self.members[name]
            member.lives += 1
            outputs = self._outputs(member)
            outputs.mkdir(parents=True)
            self.processes.launch = partial(launch_warm, prepare=prepare, outputs=outputs)
            given = arguments({"name": name, "listen": member.address, **member.flags})
            member.process = self.processes.start(PROGRAMS[name[0]], given, name=name)

    async def until_ready(self, *names: str) -> None:
        """Returns when they serve, or have ended."""
        members = [self.members[name] for name in names]
        while not all(member.ended or member.running.ready for member in members):
            self.processes.take_reports()
            await asyncio.sleep(_POLL_S)

    async def until_ended(self, name: str) -> int:
        """Returns its exit code."""
        process = self.members[name].running
        await until(lambda: process.popen.poll() is not None, timeout_s=math.inf)
        with suppress(ValueError):
            self.processes.running.remove(process)
        return process.popen.wait()

    def signal(self, name: str, number: int) -> None:
        process = self.members[name].running
        if process.popen.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    async def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        await self.until_ended(name)

    async def watch(self) -> None:
        """Records processes that end by themselves, and starts them again."""
        while True:
            for member in self.members.values():
                if not member.expected and member.ended:
                    self.crashed(member.name)
                    self.start(member.name)
            self.processes.take_reports()
            await asyncio.sleep(_POLL_S)

    def crashed(self, name: str) -> None:
        """Records the end of a process that should not have ended so."""
        process = self.members[name].running
        with suppress(ValueError):
            self.processes.running.remove(process)
        code = process.popen.poll()
        self.history.add(Crashed(self.history.now_s(), name, -1 if code is None else code, self.log_tail(name)))

    def log_tail(self, name: str) -> str:
        return (self._outputs(self.members[name]) / "stderr").read_text(errors="replace")[-_LOG_TAIL:]

    def _outputs(self, member: Member) -> Path:
        return self.logs / member.name / str(member.lives)

    # ---- what they hold

    def measure(self) -> None:
        """Records the memory and files of every process that runs."""
        for member in self.members.values():
            if not member.ended:
                with suppress(psutil.NoSuchProcess):
                    found = psutil.Process(member.running.pid)
                    rss_mib = found.memory_info().rss / _MIB
                    self.history.add(Measured(self.history.now_s(), member.name, found.pid, rss_mib, found.num_fds()))

    async def status(self, name: str) -> node_status_pb2.NodeStatus | None:
        """A node's status, not through the proxies; None if it does not answer."""
        async with connect(self.members[name].address) as channel:
            try:
                return await node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return None

    async def not_released(self, name: str) -> str:
        """Blocks and requests that an idle node still has; empty if there are none."""
        status = await self.status(name)
        if status is None:
            return "it does not answer"
        counts = {
            "requests": status.requests_running + status.requests_waiting,
            "leased blocks": status.blocks_leased,
            "used blocks": status.blocks_total - status.blocks_free,
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    async def peers_left(self, name: str) -> str:
        """The peers of a node that are neither ready nor gone, and the nodes that it should be paired with but is
        not; empty if there are none."""
        status = await self.status(name)
        if status is None:
            return "it does not answer"
        others = [each for each in self.nodes() if each.role != self.members[name].role]
        statuses = [await self.status(each.name) for each in others]
        living = {each.info.incarnation: each.info.name for each in statuses if each is not None}
        ready = {peer.incarnation for peer in status.peers if peer.phase == node_status_pb2.PEER_PHASE_READY}
        gone = {node_status_pb2.PEER_PHASE_LOST, node_status_pb2.PEER_PHASE_REFUSED}
        wrong = [f"{living[each]} is not paired" for each in living.keys() - ready]
        wrong += [
            f"{peer.name} is ready, but gone" for peer in status.peers if peer.incarnation in ready - living.keys()
        ]
        wrong += [
            f"{peer.name} is {node_status_pb2.PeerPhase.Name(peer.phase)}"
            for peer in status.peers
            if peer.incarnation not in ready and peer.phase not in gone
        ]
        return ", ".join(wrong)


@asynccontextmanager
async def cluster(scenario: Scenario, history: History, logs: Path) -> AsyncIterator[Cluster]:
    """All processes of the scenario, ready and paired; ended with the `async with` block."""
    names = (*scenario.prefills, *scenario.decodes, *scenario.gateways)
    async with AsyncExitStack() as stack:
        addresses = dict(zip(names, stack.enter_context(_ports(len(names))), strict=True))
        processes = stack.enter_context(Processes(report=lambda line: None))
        made = Cluster(processes, history, logs)
        for name in scenario.links:
            link = Link(name, addresses[name.partition("-")[2]])
            made.links[name] = await stack.enter_async_context(link)
        # Nodes keep KV in memory and in files that all of them share, and read it back in their next lives.
        kept: Flags = {"host_cache_gib": _HOST_CACHE_GIB, "file_cache_dir": made.kept}
        for name in names:
            flags = {**_FLAGS[name[0]], **_place(scenario, made.links, name)}
            if name not in scenario.gateways:
                flags |= kept
                if int(name[1:]) % 2 == 0:  # others decode token by token
                    flags["speculation"] = "always"
            made.members[name] = Member(name, addresses[name], flags)
        stack.callback(_end, made)
        nodes, gateways = names[: -len(scenario.gateways)], scenario.gateways
        made.start(*nodes)
        await made.until_ready(*nodes)
        made.start(*gateways)
        await made.until_ready(*gateways)
        assert not any(member.ended for member in made.members.values()), f"a process did not start: see {logs}"
        yield made


@asynccontextmanager
async def one_process(logs: Path) -> AsyncIterator[str]:
    """The address of a gateway in front of one node, which computes every request alone."""
    with _ports(2) as (node, gateway), Processes(report=lambda line: None) as processes:
        made = Cluster(processes, History(), logs)
        made.members["d0"] = Member("d0", node, {**_NODE, "prefix_cache": False})
        made.members["g0"] = Member("g0", gateway, {**_FLAGS["g"], "local_policy": "local", "decode": node})
        made.start("d0")
        await made.until_ready("d0")
        made.start("g0")
        await made.until_ready("g0")
        yield gateway


def _place(scenario: Scenario, links: dict[str, Link], name: str) -> Flags:
    """The flags that say where a process finds the others, and they find it."""
    if name in scenario.decodes:
        return {"advertise": links[f"{PAIRS}-{name}"].address}
    if name in scenario.prefills:
        return {}

    def through(nodes: Sequence[str]) -> str:
        return ",".join(links[f"{name}-{node}"].address for node in nodes)

    return {
        "advertise": links[f"{CLIENT}-{name}"].address,
        "local_policy": scenario.policy,
        "prefill": through(scenario.prefills),
        "decode": through(scenario.decodes),
    }


def _end(made: Cluster) -> None:
    """A frozen process would not end."""
    for member in made.members.values():
        if member.process is not None:
            made.signal(member.name, signal.SIGCONT)


@contextmanager
def _ports(count: int) -> Iterator[list[str]]:
    """Addresses of this machine that no other process gets meanwhile: sockets that do not listen hold their ports."""
    holders = []
    try:
        for _ in range(count):
            holder = socket.socket()
            holders.append(holder)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{holder.getsockname()[1]}" for holder in holders]
    finally:
        for holder in holders:
            holder.close()
