"""`make bench` runs every benchmark of this machine. It prints tables and writes pages to bench/results."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.machine import machine_and_date
from bench.table import Row, print_rows, read_json, write_json, write_markdown

RESULTS = Path(__file__).resolve().parent / "results"
PLOT = "--plot"

# Name, title, and the module whose `run` measures it. Modules are imported on use: their libraries are optional.
BENCHMARKS = (
    ("transport", "Transport alone", "bench.transport"),
    ("cache_to_cache", "Cache to cache: gather, digest, UCX, scatter", "bench.cache_to_cache"),
    ("transfer_gpu", "Cache to cache between GPUs, against a plain copy", "bench.transfer_gpu"),
    ("exposed", "Exposed transfer time of a prompt", "bench.exposed"),
    ("receiving", "Decoding while receiving", "bench.receiving"),
    ("hand_over", "Handed over against one process", "bench.hand_over"),
    ("latency", "Latency at the client with default settings", "bench.latency"),
    ("kept_kv", "KV from host memory and files", "bench.kept_kv"),
    ("speculation", "Speculative decoding on real text", "bench.speculation"),
    ("drafts", "Speculative decoding on recorded outputs", "bench.engine.drafts"),
    ("cached_prompt", "Host time of a cached prompt", "bench.cached_prompt"),
    ("host_time", "Host time of a decode node", "bench.host_time"),
    ("mtp", "Drafts of a model's own layer", "bench.engine.mtp"),
    ("eagle", "Drafts of an EAGLE-3 head", "bench.engine.eagle"),
    ("http_door", "A streamed token's cost at the gateway", "bench.http_door"),
    ("tracing", "What traces cost a gateway", "bench.tracing_served"),
    ("endurance", "Thousands of requests through one pair", "bench.endurance"),
    ("overload", "Overload", "bench.overload"),
    ("fleet", "Large clusters", "bench.fleet"),
    ("connects", "Connects that fail, and killed prefill nodes", "bench.connects"),
    ("loading", "Loading a model from disk", "bench.loading"),
    ("attention", "Attention kernels", "bench.attention.run"),
    ("engine", "The engine on a GPU", "bench.engine.run"),
    ("kernels", "A decode step, kernel by kernel", "bench.engine.kernels"),
    ("prompt_steps", "Steps that hold prompts", "bench.engine.prompt_steps"),
    ("quantized", "Quantized weights on a GPU", "bench.quantized"),
    ("hybrids", "Models with recurrent states", "bench.hybrids"),
    ("adapters", "Adapters in decode steps on a GPU", "bench.adapters"),
    ("all_at_once", "Many requests at once", "bench.all_at_once"),
    ("structured", "Structured output", "bench.structured_output.run"),
    ("goodput_chat", "Goodput of chat", "bench.goodput.chat"),
    ("goodput_long", "Goodput of long prompts", "bench.goodput.long"),
    ("goodput_trace", "A trace, served", "bench.goodput.trace"),
    ("goodput_burst", "Streams next to a burst of long prompts", "bench.goodput.burst"),
    ("routing", "The choice of prefill nodes on Mooncake's conversation trace", "bench.routing"),
)
# On a machine with a GPU these run on the GPU and have their own pages.
EITHER = frozenset(
    {
        "exposed",
        "receiving",
        "loading",
        "latency",
        "structured",
        "kept_kv",
        "speculation",
        "drafts",
        "host_time",
        "mtp",
        "eagle",
    }
)
PLOTS = (
    ("transport", "bench.transfer_plot"),
    ("cache_to_cache", "bench.transfer_plot"),
    ("transfer_gpu", "bench.transfer_plot"),
    ("attention", "bench.attention.plot"),
    ("engine", "bench.engine.plot"),
    ("routing", "bench.routing"),
    ("goodput_chat", "bench.goodput.plot"),
    ("goodput_long", "bench.goodput.plot"),
)
TRACE = "--trace="
# These take a trace's path, which is not in the repository, and are left out without one.
OF_TRACES = frozenset({"routing", "goodput_trace"})


def main(arguments: Sequence[str]) -> None:
    """Runs benchmarks, or draws the plots of earlier results.

    Args:
        arguments: names of benchmarks, none for all. `--plot` measures nothing and draws the results on disk.
            `--trace=PATH` is for benchmarks that replay one.

    Raises:
        SystemExit: with code 2: there is no such benchmark.
    """
    traces = [Path(argument.removeprefix(TRACE)) for argument in arguments if argument.startswith(TRACE)]
    wanted = [argument for argument in arguments if argument != PLOT and not argument.startswith(TRACE)]
    names = [name for name, _, _ in BENCHMARKS]
    if unknown := [name for name in wanted if name not in names]:
        print(f"bench: no benchmark is named {unknown[0]!r}; allowed: {', '.join(names)}", file=sys.stderr)
        raise SystemExit(2)
    if PLOT in arguments:
        for name, module in PLOTS:
            figures = RESULTS / f"{name}.json"
            if figures.exists() and (not wanted or name in wanted):
                importlib.import_module(module).draw(read_json(figures), RESULTS / f"{name}.svg")
        return
    for name, title, module in BENCHMARKS:
        if (wanted and name not in wanted) or (not wanted and not traces and name in OF_TRACES):
            continue
        rows: list[Row] = []
        try:
            imported = importlib.import_module(module)
            measure = imported.run
            rows.extend(measure(_print_progress, *traces) if name in OF_TRACES else measure(_print_progress))
        finally:  # a benchmark that fails or is stopped keeps its rows so far
            if rows:
                print_rows(title, rows)
                page = f"{name}_gpu" if name in EITHER and torch.cuda.is_available() else name
                write = getattr(imported, "write_markdown", write_markdown)  # some pages have columns of their own
                write(f"{title} ({machine_and_date()})", rows, RESULTS / f"{page}.md")
                write_json(rows, RESULTS / f"{page}.json")


def _print_progress(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
