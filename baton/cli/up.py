"""`baton up` runs a local cluster in the foreground; `baton demo` sends one prompt through a local cluster."""

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.generate import stream_to_terminal
from baton.cli.local_cluster import ClusterOptions, local_cluster
from baton.cli.ports import DEFAULT_HTTP_PORT, http_listen
from baton.cli.processes import Processes
from baton.cli.signals import Stopped, stop_on_signals
from baton.client.client import DEFAULT_PORT
from baton.core.errors import BatonError, ConfigError
from baton.core.limits import TOKENS_MAX
from baton.core.logs import write_in_background, write_line
from baton.core.sampling import SamplingParams
from baton.core.types import LocalPolicy
from baton.settings.config import DEMO_MODELS, is_demo_model
from baton.settings.model_source import installed_model

_NODES_MAX = 256  # of each role

DEMO_PROMPT = (
    "Write the given bytes to the file, and return the number of bytes written, which is always the length of the "
    "bytes. The file must be open for writing. If the file is not open, an error is raised. The method"
)
# Long enough that a prefill node computes it.
REAL_PROMPT = (
    "Water is a liquid at room temperature. When it is cooled below zero degrees Celsius, it freezes and becomes ice, "
    "which is lighter than water, so that it floats on lakes in winter. When water is heated to one hundred degrees "
    "Celsius, it"
)


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
            help="Model directory, GGUF file, smollm2, or name on the Hugging Face hub (owner/name@revision). "
            "Default: a small demo model."
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
    model: Annotated[
        Path | None,
        typer.Option(help="Model; default: smollm2 if its package is installed, else the bundled DeepSeek demo model."),
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; default: one that suits the model.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=TOKENS_MAX, help="Most tokens to generate.")] = 80,
) -> None:
    """Start a local cluster, send one prompt, print its receipt."""
    model = model or installed_model() or DEMO_MODELS / "deepseek"
    prompt = prompt or (DEMO_PROMPT if is_demo_model(model) else REAL_PROMPT)
    options = ClusterOptions(model=model, log_level="warning")
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
