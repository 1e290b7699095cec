"""The deployments that are compared, on the same devices one after the other: real processes, random weights.

Half of the devices have prefill nodes and half decode nodes; or every device has a node that serves requests alone.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.cli.processes import Process, Processes
from bench.exposed import Setup, on_cpu, on_gpus, write_model

ELASTIC, STATIC, COLOCATED = "elastic", "static", "colocated"

# Most of Baton's settings are the defaults. These name the model, or follow from the size of the machine.
_CPU_FLAGS = ("--device", "cpu", "--kv-cache-mib", "384")


@dataclass(frozen=True)
class Deployment:
    """One gateway with its nodes.

    Args:
        name: `ELASTIC`, which is the default; `STATIC`: every prompt goes to a prefill node; or `COLOCATED`.
    """

    name: str
    address: str


@dataclass(frozen=True)
class Machine:
    """What the nodes run on.

    Args:
        model: its name in the rows.
        places: the flags of each node's device.
    """

    model: str
    setup: Setup
    places: Sequence[Sequence[str]]

    @property
    def shape(self) -> str:
        half = len(self.places) // 2
        return f"{half}P{len(self.places) - half}D"


def this_machine() -> Machine:
    """All GPUs, at least two nodes; without any, two nodes on the CPU."""
    count = torch.cuda.device_count()
    if count == 0:
        setup = on_cpu()
        return Machine(setup.model, setup, [_CPU_FLAGS] * 2)
    setup = on_gpus()
    if count == 1:
        return Machine(setup.model, setup, [("--device", "cuda:0", "--gpu-memory-fraction", "0.45")] * 2)
    return Machine(setup.model, setup, [("--device", f"cuda:{index}") for index in range(count)])


@contextmanager
def disaggregated(machine: Machine, progress: Callable[[str], None]) -> Iterator[list[Deployment]]:
    """`STATIC` and `ELASTIC`: two gateways in front of the same nodes."""
    with _nodes(machine, progress, prefills=len(machine.places) // 2) as (processes, model, prefills, decodes):
        ends = ["--model", str(model), "--prefill", _addresses(prefills), "--decode", _addresses(decodes)]
        static = processes.start("gateway", [*ends, "--local-policy", "strict"])
        elastic = processes.start("gateway", ends)
        processes.wait_ready([static, elastic])
        yield [Deployment(STATIC, static.address), Deployment(ELASTIC, elastic.address)]


@contextmanager
def colocated(machine: Machine, progress: Callable[[str], None]) -> Iterator[list[Deployment]]:
    """Only `COLOCATED`."""
    with _nodes(machine, progress, prefills=0) as (processes, model, _, decodes):
        ends = ["--model", str(model), "--decode", _addresses(decodes), "--local-policy", "local"]
        gateway = processes.start("gateway", ends)
        processes.wait_ready([gateway])
        yield [Deployment(COLOCATED, gateway.address)]


@contextmanager
def _nodes(
    machine: Machine, progress: Callable[[str], None], *, prefills: int
) -> Iterator[tuple[Processes, Path, list[Process], list[Process]]]:
    with tempfile.TemporaryDirectory(prefix="baton-") as folder, Processes(progress) as processes:
        model = write_model(Path(folder), machine.setup)
        flags = ["--model", str(model), "--load-format", "dummy"]
        # One at a time where nodes share a device: a node measures its memory and its steps at its start.
        alone = len({tuple(place) for place in machine.places}) < len(machine.places)
        started = []
        for number, place in enumerate(machine.places):
            program = "prefill_node" if number < prefills else "decode_node"
            started.append(processes.start(program, [*flags, *place]))
            if alone:
                processes.wait_ready(started[-1:])
        processes.wait_ready(started)
        yield processes, model, started[:prefills], started[prefills:]


def _addresses(nodes: Sequence[Process]) -> str:
    return ",".join(node.address for node in nodes)
