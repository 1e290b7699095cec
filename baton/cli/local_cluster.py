"""Starts nodes and a gateway on this machine, waits until every pair is ready, and ends them."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from baton.cli.cluster_log import ClusterLog
from baton.cli.ports import refuse_taken_port
from baton.cli.processes import Process, Processes, check_running
from baton.cli.progress import ClusterProgress
from baton.client.operators import OperatorClient
from baton.core.errors import ConfigError, PermissionDenied, Unauthenticated
from baton.core.log_lines import escaped
from baton.core.types import LocalPolicy
from baton.protos.v1 import node_status_pb2
from baton.settings.config import DEMO_NOTE, is_demo_model
from baton.settings.environment import is_set, ranks_of_each_node, visible_gpus
from baton.settings.model_source import find_model, is_of_a_package, only_pools
from baton.settings.node_config import NodeSettings

_PAIRED_TIMEOUT_S = 300.0  # a pair that is refused, or a process that ends, is noticed at once
# Nodes on one GPU divide the share of memory that a single node would use.
_GPU_SHARE = NodeSettings.model_fields["gpu_memory_fraction"].default


@dataclass(frozen=True)
class ClusterOptions:
    """Options of the cluster to start. None leaves a setting to its variable or default."""

    prefill: int = 1
    decode: int | None = None  # None: 1, or 0 for a model that does not generate
    model: Path | None = None
    model_name: str | None = None
    device: str | None = None
    dtype: str | None = None
    tensor_parallel_size: int | None = None
    port: int = 0
    http: str | None = "off"
    prefill_kv_cache_layout: str | None = None
    decode_kv_cache_layout: str | None = None
    prefill_block_size: int | None = None
    decode_block_size: int | None = None
    local_policy: LocalPolicy | None = None
    log_level: str | None = None
    log_format: str | None = None
    access_log: bool = False
    certs: Path | None = None  # a folder of `baton certs`


@dataclass(frozen=True)
class LocalCluster:
    """The running processes of a local cluster; `paired` says in a sentence which nodes are paired."""

    gateway: Process
    prefill: list[Process]
    decode: list[Process]
    processes: Processes
    paired: str

    def describe(self) -> dict[str, object]:
        """Returns the object that `baton up` prints."""
        return {
            "gateway": self.gateway.address,
            "http": self.gateway.http,
            "prefill": [process.address for process in self.prefill],
            "decode": [process.address for process in self.decode],
            "pids": {
                "gateway": self.gateway.pid,
                "prefill": [process.pid for process in self.prefill],
                "decode": [process.pid for process in self.decode],
            },
        }


@contextmanager
def local_cluster(options: ClusterOptions, log: ClusterLog | None = None) -> Iterator[LocalCluster]:
    """Starts nodes and a gateway on this machine, yields once every pair is ready, and ends them afterwards.

    Args:
        log: shows the processes' log lines, which then must be JSON; None: they are shown as they are.

    Raises:
        ConfigError: the port is taken, the model cannot be found, a process did not start, or a pair was refused.
    """
    refuse_taken_port(options.port, flag="--port")
    if options.model is not None:
        found = find_model(options.model)
        # The name of a package's model is also its name for clients.
        options = options if is_of_a_package(options.model) else replace(options, model=found)
    num_decode = _num_decode(options)
    with (
        ClusterProgress(log=log) as shown,
        Processes(shown.say, launch=shown.launch, on_change=shown.update) as processes,
    ):
        shown.note(f"starting {options.prefill} prefill and {num_decode} decode node(s)")
        ranks = options.tensor_parallel_size or ranks_of_each_node()
        devices = _devices(
            options.prefill + num_decode, visible_gpus(), ranks=ranks, device_given=options.device is not None
        )
        prefill, decode = (
            [_start_node(processes, options, role, index, next(devices)) for index in range(count)]
            for role, count in (("prefill", options.prefill), ("decode", num_decode))
        )
        nodes = [*prefill, *decode]
        # The gateway starts while the nodes load, so that its ports are bound early too.
        processes.wait_bound(nodes)
        gateway = processes.start("gateway", _gateway_arguments(options, prefill, decode))
        processes.wait_ready([*nodes, gateway])
        for process in (*nodes, gateway):
            shown.note(f"{process.name} serves on {process.address}")
        try:
            ca = options.certs and options.certs / "ca.crt"
            adapters = asyncio.run(_until_paired(gateway, prefill, decode, ca))
        except (Unauthenticated, PermissionDenied):
            paired = "serving; to check that all nodes are paired, set BATON_API_KEY to an operator's key"
        else:
            paired = "every prefill node is paired with every decode node" if decode else "every prefill node serves"
            if adapters:
                paired += f"; adapters {', '.join(adapters)}"
        if _serves_demo(options):
            paired += f". This is a {DEMO_NOTE} (--model smollm2 does)"
        shown.close()
        shown.note(paired)
        yield LocalCluster(gateway, prefill, decode, processes, paired)
        shown.say("stopping")


def _num_decode(options: ClusterOptions) -> int:
    """The number of decode nodes: a checkpoint that only makes embeddings or scores needs none."""
    if options.decode is not None:
        return options.decode
    return 0 if options.model is not None and only_pools(options.model) else 1


def _serves_demo(options: ClusterOptions) -> bool:
    """Whether the cluster serves a model that comes with Baton, which is also the default."""
    return not is_set("model") if options.model is None else is_demo_model(options.model)


def _start_node(processes: Processes, options: ClusterOptions, role: str, index: int, device: list[str]) -> Process:
    arguments = _node_arguments(options, role, index) + device
    return processes.start(f"{role}_node", arguments, name=f"{role}-{index}")


def _node_arguments(options: ClusterOptions, role: str, index: int) -> list[str]:
    layout = options.prefill_kv_cache_layout if role == "prefill" else options.decode_kv_cache_layout
    block_size = options.prefill_block_size if role == "prefill" else options.decode_block_size
    return _flags(
        {
            "name": f"{role}-{index}",
            "model": options.model,
            "kv-cache-layout": layout,
            "block-size": block_size,
            "device": options.device,
            "dtype": options.dtype,
            "tensor-parallel-size": options.tensor_parallel_size,
            "log-level": options.log_level,
            "log-format": options.log_format,
            **_own_certificate(options, role),
        }
    )


def _own_certificate(options: ClusterOptions, role: str) -> dict[str, object]:
    if options.certs is None:
        return {}
    certs = options.certs
    return {"tls-cert": certs / f"{role}.crt", "tls-key": certs / f"{role}.key", "tls-ca": certs / "ca.crt"}


def _devices(num_nodes: int, num_gpus: int, *, ranks: int = 1, device_given: bool = False) -> Iterator[list[str]]:
    """Yields the device flags of each node. Nodes take GPUs in turn, one per rank, and share a GPU's memory equally.

    A device or memory fraction that flags or environment set is kept.
    """
    device_given = device_given or is_set("device")
    places = max(1, num_gpus // ranks)
    sharing = -(-num_nodes // places)
    for index in range(num_nodes):
        flags: dict[str, object] = {}
        if num_gpus and not device_given:
            flags["device"] = f"cuda:{index % places * ranks}"
        if num_gpus and sharing > 1 and not is_set("gpu_memory_fraction"):
            flags["gpu-memory-fraction"] = round(_GPU_SHARE / sharing, 3)
        yield _flags(flags)


def _gateway_arguments(options: ClusterOptions, prefill: list[Process], decode: list[Process]) -> list[str]:
    return _flags(
        {
            "listen": f"127.0.0.1:{options.port}",
            "http-listen": options.http,
            "model": options.model,
            "model-name": options.model_name,
            "prefill": ",".join(process.address for process in prefill),
            "decode": ",".join(process.address for process in decode),
            "local-policy": options.local_policy,
            "log-level": options.log_level,
            "log-format": options.log_format,
            "access-log": "true" if options.access_log else None,
            **_own_certificate(options, "gateway"),
            "client-tls-cert": options.certs and options.certs / "clients.crt",
            "client-tls-key": options.certs and options.certs / "clients.key",
        }
    )


def _flags(values: dict[str, object]) -> list[str]:
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


async def _until_paired(
    gateway: Process, prefill: list[Process], decode: list[Process], tls_ca: Path | None = None
) -> list[str]:
    """Waits until every pair is ready. Returns the names of the adapters that all nodes have.

    Raises:
        Unauthenticated, PermissionDenied: the gateway requires an operator's key.
        ConfigError: a pair was refused, a pair was not ready in time, or a process ended.
    """
    wanted = len(prefill) * len(decode)
    deadline = time.monotonic() + _PAIRED_TIMEOUT_S
    async with OperatorClient(gateway.address, tls_ca=tls_ca) as client:
        while True:
            check_running([*prefill, *decode, gateway])
            status = await client.cluster_status()
            peers = [
                peer
                for node in status.nodes
                if node.status.info.role == node_status_pb2.ROLE_PREFILL
                for peer in node.status.peers
            ]
            for peer in peers:
                if peer.phase == node_status_pb2.PEER_PHASE_REFUSED:
                    reasons = "; ".join(f"{item.field}: {item.ours} and {item.theirs}" for item in peer.mismatches)
                    raise ConfigError(f"{peer.name} and its prefill node are incompatible: {reasons}")
            ready = sum(peer.phase == node_status_pb2.PEER_PHASE_READY for peer in peers)
            if ready == wanted and len(status.nodes) == len(prefill) + len(decode):
                loaded = ({adapter.name for adapter in node.status.adapters} for node in status.nodes)
                return sorted(map(escaped, set.intersection(*loaded)))
            if time.monotonic() > deadline:
                raise ConfigError(f"{ready} of {wanted} pairs are ready after {_PAIRED_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.05)
