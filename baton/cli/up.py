"""`baton up` runs a local cluster in the foreground; `baton demo` sends one prompt through a local cluster."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.generate import stream_to_terminal
from baton.cli.ports import DEFAULT_HTTP_PORT, http_listen, refuse_taken_port
from baton.cli.processes import Process, Processes, check_running
from baton.cli.progress import ClusterProgress
from baton.cli.signals import Stopped, stop_on_signals
from baton.client.client import DEFAULT_PORT
from baton.client.operators import OperatorClient
from baton.core.errors import BatonError, ConfigError, PermissionDenied, Unauthenticated
from baton.core.limits import TOKENS_MAX
from baton.core.log_lines import escaped
from baton.core.logs import write_in_background, write_line
from baton.core.sampling import SamplingParams
from baton.core.types import LocalPolicy
from baton.protos.v1 import node_status_pb2
from baton.settings.config import DEMO_MODELS
from baton.settings.environment import is_set, ranks_of_each_node, visible_gpus
from baton.settings.model_source import find_model
from baton.settings.node_config import NodeSettings

_PAIRED_TIMEOUT_S = 60.0
_NODES_MAX = 256  # of each role
# Nodes on one GPU divide the share of memory that a single node would use.
_GPU_SHARE = NodeSettings.model_fields["gpu_memory_fraction"].default

DEMO_PROMPT = (
    "Write the given bytes to the file, and return the number of bytes written, which is always the length of the "
    "bytes. The file must be open for writing. If the file is not open, an error is raised. The method"
)


@dataclass(frozen=True)
class ClusterOptions:
    """Options of the cluster to start. None leaves a setting to its variable or default."""

    prefill: int = 1
    decode: int = 1
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
    certs: Path | None = None  # a folder of `baton certs`


@dataclass(frozen=True)
class LocalCluster:
    """The running processes of a local cluster."""

    gateway: Process
    prefill: list[Process]
    decode: list[Process]
    processes: Processes

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
def local_cluster(options: ClusterOptions) -> Iterator[LocalCluster]:
    """Starts nodes and a gateway on this machine, yields once every pair is ready, and ends them afterwards.

    Raises:
        ConfigError: the port is taken, the model cannot be found, a process did not start, or a pair was refused.
    """
    refuse_taken_port(options.port, flag="--port")
    if options.model is not None:
        options = replace(options, model=find_model(options.model))
    with ClusterProgress() as shown, Processes(shown.say, launch=shown.launch, on_change=shown.update) as processes:
        shown.say(f"starting {options.prefill} prefill and {options.decode} decode node(s)")
        ranks = options.tensor_parallel_size or ranks_of_each_node()
        devices = _devices(
            options.prefill + options.decode, visible_gpus(), ranks=ranks, device_given=options.device is not None
        )
        prefill, decode = (
            [_start_node(processes, options, role, index, next(devices)) for index in range(count)]
            for role, count in (("prefill", options.prefill), ("decode", options.decode))
        )
        nodes = [*prefill, *decode]
        # The gateway starts while the nodes load, so that its ports are bound early too.
        processes.wait_bound(nodes)
        gateway = processes.start("gateway", _gateway_arguments(options, prefill, decode))
        processes.wait_ready([*nodes, gateway])
        try:
            ca = options.certs and options.certs / "ca.crt"
            adapters = asyncio.run(_until_paired(gateway, prefill, decode, ca))
        except (Unauthenticated, PermissionDenied):
            paired = "serving; to check that all nodes are paired, set BATON_API_KEY to an operator's key"
        else:
            paired = "every prefill node is paired with every decode node"
            if adapters:
                paired += f"; adapters {', '.join(adapters)}"
        shown.close()
        shown.say(paired)
        yield LocalCluster(gateway, prefill, decode, processes)
        shown.say("stopping")


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


def up(
    prefill_nodes: Annotated[
        int, typer.Option(min=0, max=_NODES_MAX, help="Number of prefill nodes.")
    ] = ClusterOptions.prefill,
    decode_nodes: Annotated[
        int, typer.Option(min=1, max=_NODES_MAX, help="Number of decode nodes.")
    ] = ClusterOptions.decode,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Model directory, or name on the Hugging Face hub (owner/name@revision). Default: a small demo model."
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name under which clients request the model. Default: that of --model.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="gRPC port of the gateway; 0 takes a free port.")
    ] = DEFAULT_PORT,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"HTTP port of the gateway; 0 takes a free port. Default: {DEFAULT_HTTP_PORT}, or a free port if it "
            "is in use.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device of every node: cpu, cuda, cuda:1. Default: each node takes the next GPU, if any."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of weights and activations: auto, float32, bfloat16, float16. Default: auto."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, max=64, help="Ranks of each node: GPUs, or processes on a CPU. Default: 1.")
    ] = None,
    prefill_kv_cache_layout: Annotated[
        str | None,
        typer.Option(help="KV cache layout of prefill nodes: NHD, HND, BLNHC, BLHNC; for MLA models LBNC or BLNC."),
    ] = None,
    decode_kv_cache_layout: Annotated[
        str | None, typer.Option(help="KV cache layout of decode nodes; may differ from the prefill nodes'.")
    ] = None,
    prefill_block_size: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Tokens per KV block on prefill nodes.")
    ] = None,
    decode_block_size: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Tokens per KV block on decode nodes.")
    ] = None,
    local_policy: Annotated[
        LocalPolicy | None,
        typer.Option(help="Whether decode nodes may compute prompts themselves. Default: elastic."),
    ] = None,
    certs: Annotated[
        Path | None,
        typer.Option(help="Folder made by `baton certs`; turns on TLS between all processes and for clients."),
    ] = None,
) -> None:
    """Run a local cluster in the foreground until Ctrl-C. Prints one JSON line on stdout when it is ready.

    Other settings of nodes and gateway come from BATON_* variables: see `baton prefill-node --help`.
    """
    write_in_background("stderr", "stdout")
    options = ClusterOptions(
        prefill=prefill_nodes,
        decode=decode_nodes,
        model=model,
        model_name=model_name,
        device=device,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        port=port,
        prefill_kv_cache_layout=prefill_kv_cache_layout,
        decode_kv_cache_layout=decode_kv_cache_layout,
        prefill_block_size=prefill_block_size,
        decode_block_size=decode_block_size,
        local_policy=local_policy,
        certs=certs,
    )
    try:
        with stop_on_signals(), local_cluster(replace(options, http=http_listen(http_port))) as cluster:
            print(json.dumps(cluster.describe()), flush=True)
            _wait_until_the_gateway_ends(cluster.processes)
    except Stopped:
        _report("stopped")
    except BatonError as error:
        _report(str(error))
        raise typer.Exit(1) from None


def demo(
    model: Annotated[Path | None, typer.Option(help="Model directory; default: the DeepSeek demo model.")] = None,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = DEMO_PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, max=TOKENS_MAX, help="Most tokens to generate.")] = 80,
) -> None:
    """Start a local cluster, send one prompt, print its receipt."""
    options = ClusterOptions(model=model or DEMO_MODELS / "deepseek", log_level="warning")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    try:
        with stop_on_signals(), local_cluster(options) as cluster:
            _report("prompt:")
            print(prompt, end="", flush=True)
            finished = asyncio.run(stream_to_terminal(cluster.gateway.address, prompt, params))
            _report("receipt:")
            for name, value in asdict(finished.receipt).items():
                text = f"{value:.6f}" if isinstance(value, float) else value
                print(f"  {name:<22} {text}".rstrip())
    except Stopped:
        _report("stopped")
        raise typer.Exit(130) from None
    except BatonError as error:
        _report(str(error))
        raise typer.Exit(1) from None


def _wait_until_the_gateway_ends(processes: Processes) -> None:
    """Waits for the gateway's end, and drops nodes that end before it. Never returns.
    Raises:
        ConfigError: the gateway ended.
    """
    while True:
        ended = processes.first_ended()
        if ended is None:
            time.sleep(0.2)
            continue
        processes.take_reports()
        line = f"{ended.name} at {ended.address} (pid {ended.pid}) ended {ended.how}"
        line += f": {ended.error}" if ended.error else ""
        if ended.program == "gateway":
            raise ConfigError(line)
        _report(f"{line}; the cluster continues without it")
        processes.running.remove(ended)


def _report(line: str) -> None:
    write_line(f"baton: {line}")
