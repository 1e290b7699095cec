"""Real processes for tests: nodes and gateways on free ports of this machine, ended with the `with` block."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.cli.processes import Process, Processes
from baton.config import DEMO_MODELS
from baton.rpc.server import connect
from protos.baton.v1 import node_pb2, node_pb2_grpc
from tests.warm import launch_warm

LLAMA = DEMO_MODELS / "llama"
DEEPSEEK = DEMO_MODELS / "deepseek"

Flags = dict[str, object]

_names = itertools.count()


@dataclass
class Machines:
    """Starts nodes and gateways, and signals them."""

    processes: Processes

    def nodes(self, *wanted: tuple[str, Flags]) -> list[Process]:
        """Starts nodes side by side, each as (role, flags), and waits until they serve; on the CPU if no flag says
        otherwise."""
        named = [(role, {"name": f"{role}-{next(_names)}", "device": "cpu", **flags}) for role, flags in wanted]
        started = [self.processes.start(f"{role}_node", arguments(flags)) for role, flags in named]
        self.processes.wait_ready(started)
        return started

    def gateway(self, prefill: Sequence[Process], decode: Sequence[Process], **flags: object) -> Process:
        """Starts a gateway in front of these nodes and waits until it is ready and every pair has settled."""
        joined = {
            "prefill": ",".join(node.address for node in prefill),
            "decode": ",".join(node.address for node in decode),
        }
        gateway = self.processes.start("gateway", arguments({**joined, **flags}))
        self.processes.wait_ready([gateway])
        return gateway

    def kill(self, process: Process) -> None:
        """kill -9, and waits for its end."""
        process.popen.kill()
        process.popen.wait(10)

    def end(self, process: Process) -> int:
        """SIGTERM; returns the exit code."""
        process.popen.send_signal(signal.SIGTERM)
        return process.popen.wait(40)

    def freeze(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGSTOP)

    def thaw(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGCONT)


@contextmanager
def machines() -> Iterator[Machines]:
    with Processes(report=lambda line: None, launch=launch_warm) as processes:
        yield Machines(processes)


def arguments(flags: Flags) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]


async def status(node: Process) -> node_pb2.NodeStatus:
    async with connect(node.address) as channel:
        return await node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest())


async def until_status(
    node: Process, condition: Callable[[node_pb2.NodeStatus], bool], *, within_s: float = 10.0
) -> node_pb2.NodeStatus:
    """The node's status as soon as the condition holds for it.

    Raises:
        AssertionError: it did not within that time; shows the last status.
    """
    deadline = time.monotonic() + within_s
    async with connect(node.address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        while True:
            last = await stub.Describe(node_pb2.DescribeRequest())
            if condition(last):
                return last
            assert time.monotonic() < deadline, f"not within {within_s} s: {last}"
            await asyncio.sleep(0.005)


def nothing_held(last: node_pb2.NodeStatus) -> bool:
    """I1 as seen from outside: no request, no lease, every block free."""
    return last.requests_running == 0 and last.blocks_leased == 0 and last.blocks_free == last.blocks_total
