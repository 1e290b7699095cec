"""Real processes for tests: nodes and gateways on free ports of this machine, ended with the `with` block."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from baton.cli.processes import Process, Processes
from baton.core.costs import StepCosts, StepWork
from baton.engine import tiered_prefixes
from baton.engine.step_meter import StepMeter
from baton.gateway.request import connections, node_clients
from baton.gateway.request import machine as request_machine
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import generation_pb2, node_status_pb2
from baton.protos.v1.generation_pb2_grpc import GenerationStub
from baton.rpc.channels import connect
from baton.settings.config import DEMO_MODELS
from kvtransfer import offload_calls, offload_queue, offload_tiers
from kvtransfer.stores import read_speed
from tests.paused_engine import PausedSteps
from tests.warm import SHOW_STACKS, launch_warm
from tests.warm_children import keep_children_warm

LLAMA = DEMO_MODELS / "llama"
DEEPSEEK = DEMO_MODELS / "deepseek"

# Long enough for any machine: only a hanging process takes that long.
DEADLINE_S = 300.0

Flags = dict[str, object]

# The same on any machine: limits are so long that no working request times out, and where a prompt is prefilled does
# not depend on measured times. Tests of these set their own.
_STEADY_NODE: Flags = {"keepalive_s": 2 * DEADLINE_S, "drain_grace_s": 2 * DEADLINE_S}
_STEADY: dict[str, Flags] = {
    "prefill": {**_STEADY_NODE, "connect_timeout_s": 2 * DEADLINE_S},
    "decode": {**_STEADY_NODE, "lease_s": 2 * DEADLINE_S, "local_prefill_tokens": 32},
    "gateway": {
        "workers": 1,  # also on hosts with GPUs: what `prepare` changes holds in one process only
        "local_policy": "prefer",
        "drain_grace_s": 2 * DEADLINE_S,
        "keepalive_s": 2 * DEADLINE_S,
        "prefill_stall_s": 2 * DEADLINE_S,
        "decode_stall_s": 2 * DEADLINE_S,
        "max_queue_s": 2 * DEADLINE_S,
    },
}

# What nodes find that their steps cost, 50 us for a token, on however slow a machine: gateways choose nodes by it and
# decide by it who waits, and nodes cut prompts by it.
_STEADY_COSTS = StepCosts(((1, 0.0001), (1001, 0.0501)))

_names = itertools.count()


@dataclass
class Machines:
    """Starts nodes and gateways, holds the engines of nodes, and sends signals.

    A node with a `paused_engine` runs no engine step until the test allows it. So a request stays in the state that
    the test needs, on any machine.
    """

    processes: Processes
    _steps: dict[int, PausedSteps] = field(default_factory=dict)  # by the pid of a node with a paused engine

    def nodes(
        self,
        *wanted: tuple[str, Flags],
        paused_engine: Sequence[str] = (),
        prepare: Callable[[], None] | None = None,
        outputs: Path | None = None,
        wait: bool = True,
    ) -> list[Process]:
        """Starts nodes at the same time, each as (role, flags), and waits until they serve; on the CPU if no flag says
        otherwise.

        Args:
            paused_engine: roles whose nodes all start with a paused engine.
            prepare: called in the process of each node, before it starts.
            outputs: an existing directory for the files `stdout` and `stderr` of nodes whose engines run.
            wait: False: only until their ports are bound.
        """
        started = []
        for role, flags in wanted:
            named = {"name": f"{role}-{next(_names)}", "device": "cpu", **_STEADY[role], **flags}
            steps = PausedSteps() if role in paused_engine else None
            prepared = partial(_prepare_node, prepare, 0 if "num_hosts" in named else _ranks_of(named) - 1)
            launch = partial(launch_warm, prepare=prepared, outputs=outputs)
            self.processes.launch = launch if steps is None else partial(steps.launch, prepare=prepared)
            process = self.processes.start(f"{role}_node", arguments(named))
            if steps is not None:
                self._steps[process.pid] = steps
            started.append(process)
        (self.processes.wait_ready if wait else self.processes.wait_bound)(started)
        return started

    def allow_steps(self, count: int, *nodes: Process) -> None:
        """Lets each of these paused engines run this number of further steps."""
        for node in nodes:
            self._steps[node.pid].allow(count)

    def let_go(self, *nodes: Process) -> None:
        """Lets these paused engines run on."""
        for node in nodes:
            self._steps[node.pid].allow_all()

    def let_all_go(self) -> None:
        for steps in self._steps.values():
            steps.allow_all()

    def gateway(
        self,
        prefill: Sequence[Process],
        decode: Sequence[Process],
        *,
        prepare: Callable[[], None] | None = None,
        outputs: Path | None = None,
        wait: bool = True,
        **flags: object,
    ) -> Process:
        """Starts a gateway in front of these nodes and waits until it is ready and every pair has settled.

        Args:
            prepare: called in its process before it starts.
            outputs: an existing directory for its files `stdout` and `stderr`.
            wait: False: only until its port is bound.
        """
        joined = {
            "prefill": ",".join(node.address for node in prefill),
            "decode": ",".join(node.address for node in decode),
        }
        self.processes.launch = partial(launch_warm, prepare=partial(_prepare_gateway, prepare), outputs=outputs)
        gateway = self.processes.start("gateway", arguments({**joined, **_STEADY["gateway"], **flags}))
        (self.processes.wait_ready if wait else self.processes.wait_bound)([gateway])
        return gateway

    def kill(self, process: Process) -> None:
        """kill -9, and waits for its end."""
        process.popen.kill()
        process.popen.wait(DEADLINE_S)

    def end(self, process: Process) -> int:
        """SIGTERM; returns the exit code."""
        process.popen.send_signal(signal.SIGTERM)
        return process.popen.wait(DEADLINE_S)

    def freeze(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGSTOP)

    def thaw(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGCONT)


def _ranks_of(flags: Flags) -> int:
    return int(str(flags.get("tensor_parallel_size", 1)))


def _prepare_node(prepare: Callable[[], None] | None, more_ranks: int) -> None:
    """Gives steps their steady costs in place of measured ones, lets requests wait for stores without a limit, and
    keeps processes for the ranks above 0.

    A node that stood still for a while is not stuck, for which gateways would choose other ones. One that ends has the
    time that it needs to write the KV that it keeps.
    """
    from baton.node import own_status, process  # here, because they import torch
    from baton.node.ranks import group, serving

    StepMeter.observe = _observe_steady  # type: ignore[assignment, method-assign]
    own_status.STUCK_AFTER_S = process.STUCK_AFTER_S = serving._STUCK_AFTER_S = DEADLINE_S  # type: ignore[attr-defined]
    tiered_prefixes._FIND_S = tiered_prefixes._LOAD_S = DEADLINE_S
    offload_calls.FIND_LIMIT_S = offload_queue.STUCK_AFTER_S = offload_tiers._CLOSE_TIMEOUT_S = DEADLINE_S
    process._CLOSE_S = group._END_TIMEOUT_S = DEADLINE_S
    offload_tiers._WRITES_SHARE = 1.0  # a slow disk leaves nothing unwritten that host memory has room for
    read_speed._READS_MIN = read_speed._READS_MAX + 1  # a disk that stood still for a while is not slow
    keep_children_warm(more_ranks)  # these have the values above, too
    if prepare is not None:
        prepare()


def _observe_steady(meter: StepMeter, work: StepWork, seconds: float) -> None:
    meter._costs = _STEADY_COSTS


def _prepare_gateway(prepare: Callable[[], None] | None) -> None:
    """Makes gateways wait without a time limit: for every pair to settle before they are ready, for the prefill node's
    count of sent bytes, and for the last tokens of a node that ends."""
    connections._SETTLE_TIMEOUT_S = node_clients._LAST_MESSAGES_S = DEADLINE_S
    request_machine._RECEIPT_WAIT_S = DEADLINE_S
    if prepare is not None:
        prepare()


@contextmanager
def machines() -> Iterator[Machines]:
    with Processes(report=lambda line: None, launch=launch_warm) as processes:
        started = Machines(processes)
        try:
            yield started
        finally:
            started.let_all_go()


def arguments(flags: Flags) -> list[str]:
    return [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]


async def until_answers(gateway: Process) -> None:
    """Returns once a gateway answers whose port was only bound: there a call without this wait may fail at once."""
    async with connect(gateway.address) as channel:
        models = GenerationStub(channel).ListModels
        await models(generation_pb2.ListModelsRequest(), wait_for_ready=True, timeout=DEADLINE_S)


async def status(node: Process) -> node_status_pb2.NodeStatus:
    async with connect(node.address) as channel:
        return await node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest())


async def until_status(
    node: Process, condition: Callable[[node_status_pb2.NodeStatus], bool], *, within_s: float = DEADLINE_S
) -> node_status_pb2.NodeStatus:
    """The node's status as soon as the condition holds for it.

    Raises:
        AssertionError: the condition did not hold within that time; shows the last status, and where the node's threads
            are.
    """
    deadline = time.monotonic() + within_s
    async with connect(node.address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        while True:
            last = await stub.Describe(node_pb2.DescribeRequest())
            if condition(last):
                return last
            if time.monotonic() >= deadline:
                node.popen.send_signal(SHOW_STACKS)
                await asyncio.sleep(1.0)
                raise AssertionError(f"not within {within_s} s: {last}")
            await asyncio.sleep(0.005)


async def first_of(condition: Callable[[Process], Awaitable[object]], nodes: Sequence[Process]) -> Process:
    """The first node for which the condition holds."""
    waits = {asyncio.ensure_future(condition(node)): node for node in nodes}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    wait = done.pop()
    await wait
    return waits[wait]


def in_engine(last: node_status_pb2.NodeStatus) -> int:
    """How many requests the node's engine has, but for those that wait for their KV."""
    return last.requests_running + last.requests_waiting


def nothing_held(last: node_status_pb2.NodeStatus) -> bool:
    """I1 as the status shows it: no request, no lease, every block free.

    A request that waits holds no block yet, but takes steps from those that come after it.
    """
    free = last.blocks_leased == 0 and last.blocks_free == last.blocks_total
    return free and in_engine(last) == 0
