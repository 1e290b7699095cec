"""`baton up` runs a local cluster in the foreground.

On a terminal it shows addresses, an example, and a row for each request; elsewhere one line of JSON.
"""

import json
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.cluster_log import HEADER, ClusterLog
from baton.cli.local_cluster import ClusterOptions, LocalCluster, local_cluster
from baton.cli.ports import DEFAULT_HTTP_PORT, http_listen
from baton.cli.processes import Processes
from baton.cli.signals import Stopped, stop_on_signals
from baton.client.client import DEFAULT_PORT, DEFAULT_TARGET
from baton.core.errors import BatonError, ConfigError
from baton.core.logs import write_in_background, write_line
from baton.core.types import LocalPolicy

_NODES_MAX = 256  # of each role

# Long enough that by default a prefill node computes it and hands its KV over; decode nodes compute short prompts.
EXAMPLE_PROMPT = (
    "Return the names of the attributes of the object, of its class, and of all classes from which its class is "
    "derived, in the order in which they were defined. If the object has no attributes,"
)


def up(
    prefill_nodes: Annotated[
        int, typer.Option(min=0, max=_NODES_MAX, help="Number of prefill nodes.")
    ] = ClusterOptions.prefill,
    decode_nodes: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=_NODES_MAX,
            help="Number of decode nodes. Default: 1, or 0 for a checkpoint that only makes embeddings or scores.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Model directory, GGUF file, smollm2, or name on the Hugging Face hub (owner/name@revision). "
            "Default: a small demo model."
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name under which clients request the model. Default: that of --model.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="gRPC port of the gateway; 0 picks a free one.")
    ] = DEFAULT_PORT,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"HTTP port of the gateway; 0 picks a free one. Default: {DEFAULT_HTTP_PORT}, or a free port if it "
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
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all log lines of nodes and gateway, not only warnings and errors.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the addresses as one line of JSON; the default if stdout is not a terminal."
        ),
    ] = False,
) -> None:
    """Run a local cluster until Ctrl-C, and show its requests.

    Each request that ends gets a row: where its prompt was prefilled and where its output was decoded, how much KV
    moved, and its latencies. Other settings of nodes and gateway come from BATON_* variables: see `baton prefill-node
    --help`.
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
    log = None
    if sys.stdout.isatty() and not as_json:
        log = ClusterLog(verbose=verbose)
        options = replace(options, log_format="json", access_log=True)
    try:
        with stop_on_signals(), local_cluster(replace(options, http=http_listen(http_port)), log) as cluster:
            print(json.dumps(cluster.describe()) if log is None else welcome(cluster, certs), flush=True)
            wait_until_it_cannot_serve(cluster.processes)
    except Stopped:
        _report("stopped")
    except BatonError as error:
        _report(str(error))
        raise typer.Exit(1) from None


def welcome(cluster: LocalCluster, certs: Path | None) -> str:
    """What a person needs once the cluster serves: addresses, one example, and the header of the rows that follow."""
    target = cluster.gateway.address
    http = cluster.gateway.http
    flags = [] if target == DEFAULT_TARGET else ["--target", target]
    if certs is not None:
        flags += ["--client-ca", str(certs / "ca.crt")]
    addresses = [("gRPC", target, "baton chat, generate, status; baton.Client")]
    if http is not None:
        addresses = [
            ("HTTP", http, "APIs of OpenAI and Anthropic"),
            ("page", f"{http}/ui", "nodes, requests and links in the browser"),
            *addresses,
        ]
    width = max(len(address) for _, address, _ in addresses)
    counts = ((len(nodes), role) for nodes, role in ((cluster.prefill, "prefill"), (cluster.decode, "decode")))
    nodes = " and ".join(f"{count} {role} node{'' if count == 1 else 's'}" for count, role in counts)
    return "\n".join(
        [
            f"Baton serves with {nodes}; {cluster.paired}. Ctrl-C ends it.",
            "",
            *(f"  {name}  {address:<{width}}  {what}" for name, address, what in addresses),
            "",
            "Try it in another terminal:",
            "",
            f"  {shlex.join([program_name(), 'generate', *flags, '--max-tokens', '40'])} \\",
            f'    "{EXAMPLE_PROMPT}"',
            "",
            "Each request that ends gets a row (prompt and output in tokens):",
            "",
            HEADER,
        ]
    )


def program_name() -> str:
    """How a user in another terminal of this directory runs `baton`."""
    path = sys.argv[0]
    if Path(path).name != "baton" or shutil.which("baton") == path:
        return "baton"
    return path


def wait_until_it_cannot_serve(processes: Processes) -> None:
    """Waits for the end of the gateway or of the last node, and reports nodes that end before. Never returns.

    Raises:
        ConfigError: the gateway ended, or no node is left.
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
        processes.running.remove(ended)
        if all(left.program == "gateway" for left in processes.running):
            raise ConfigError(f"{line}; no node is left")
        _report(f"{line}; the cluster continues without it")


def _report(line: str) -> None:
    write_line(f"baton: {line}")
