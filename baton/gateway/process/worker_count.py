"""The default number of worker processes of a gateway, from the machine's cores, memory and GPUs."""

import socket
from contextlib import suppress
from dataclasses import dataclass, field

from baton.core.cores import usable_cores
from baton.core.memory import memory_limit_bytes
from baton.settings.config import MIB
from baton.settings.environment import visible_gpus
from baton.settings.gateway_config import GatewaySettings

WORKERS_MAX = 8  # each one has its own streams with every node
# A worker with many streams takes 1.1 to 1.2 cores; the rest of the second one tokenizes and compiles constraints.
_CORES_PER_WORKER = 2
# A worker takes 100 MiB, an index of a million blocks 200 more, and large bodies up to an eighth of all memory.
_MEMORY_PER_WORKER = 512 * MIB
# Of a node on the same host: the loop that queues its steps, KV transfer, messages, and the ranks' own threads.
_CORES_PER_NODE = 4
# One GPU makes about 10,000 tokens a second of a model of 8B, which is nearly what one worker sends one by one.
_WORKERS_PER_GPU = 2


@dataclass(frozen=True)
class GatewayHost:
    """The facts about the machine that decide the number of workers.

    Attributes:
        cores: cores that this process may use, without regard to other processes.
        memory_bytes: memory that this process may use.
        gpus: GPUs of this machine.
        nodes: nodes of this gateway that run on this machine.
    """

    cores: float
    memory_bytes: int
    gpus: int = 0
    nodes: int = 0

    @classmethod
    def of_this_process(cls, settings: GatewaySettings) -> "GatewayHost":
        """Looks at the machine. Of the places that list nodes, only addresses say whether a node is here."""
        places = f"{settings.prefill},{settings.decode}".split(",")
        hosts = [place.strip().rpartition(":")[0] for place in places if "://" not in place]
        return cls(usable_cores(), memory_limit_bytes(), visible_gpus(), sum(map(is_of_this_host, hosts)))

    def __str__(self) -> str:
        here = f", {self.nodes} node(s) and {self.gpus} GPU(s) here" if self.nodes else ""
        return f"{self.cores:g} core(s), {self.memory_bytes // MIB} MiB{here}"


@dataclass(frozen=True)
class WorkerCount:
    """A number of workers, and the sentence that says why."""

    workers: int
    why: str = field(compare=False)


def choose_workers(host: GatewayHost) -> WorkerCount:
    """Chooses the number of workers: one for every two cores and 512 MiB, at least 1 and at most 8.

    Where nodes run on the same host, it leaves them four cores for each node or GPU, and two workers for each GPU
    suffice. Nodes without a GPU never make as many tokens as one worker sends.
    """
    bounds = {"no gateway has more by default": WORKERS_MAX, "one for every 512 MiB": _for_memory(host)}
    if host.nodes:
        kept = _CORES_PER_NODE * max(host.gpus, host.nodes)
        bounds["nodes on this host share its cores"] = int((host.cores - kept) // _CORES_PER_WORKER)
        bounds["two for each GPU of this host"] = _WORKERS_PER_GPU * host.gpus
    else:
        bounds["one for every two cores"] = int(host.cores // _CORES_PER_WORKER)
    why, least = min(bounds.items(), key=lambda bound: bound[1])
    return WorkerCount(max(1, least), why)


def is_of_this_host(host: str) -> bool:
    """Whether an address is one of this machine's own. Asks no name server."""
    if not host or host in ("localhost", socket.gethostname()):
        return bool(host)
    host = host.removeprefix("[").removesuffix("]")
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        return any(_can_bind(family, address) for family, _, _, _, address in found)
    return False


def _can_bind(family: int, address: object) -> bool:
    """The kernel lets a socket have an address only if it is this machine's."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # type: ignore[arg-type]
    except OSError:
        return False
    return True


def _for_memory(host: GatewayHost) -> int:
    return host.memory_bytes // _MEMORY_PER_WORKER
