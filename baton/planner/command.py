"""The command `baton plan`: its flags, and the sources of model, costs and load."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.core.errors import InvalidRequest
from baton.core.limits import COUNT_MAX, RATE_MAX, RATE_MIN
from baton.core.pull_costs import ASSUMED_PULL, PullCosts
from baton.load.arrivals import Arrivals
from baton.load.goals import DEFAULT_SHARE, Goal
from baton.load.lengths import FORMS
from baton.load.shape import Shape
from baton.load.workload import PRESETS, LengthSpan, TraceReplay, Workload
from baton.models.config.mtp import with_mtp
from baton.models.families.reader import read_config
from baton.models.loading.gguf.view import model_directory
from baton.planner.cost_sources import Lengths, kind_by_roofline, kind_from_nodes, read_costs
from baton.planner.drafts import parse_drafts
from baton.planner.goodput import Measure
from baton.planner.model_size import ModelSize, model_size
from baton.planner.plan import NodeKind, OnStep, Question, find_plan
from baton.planner.report import render, to_json
from baton.planner.roofline import GPUS, Gpu, gpu_of
from baton.planner.store_capacity import StoreSizes

_FORMS = ", ".join(FORMS)
_PRESETS = "; ".join(f"{name} is {prompts} in, {outputs} out" for name, (prompts, outputs) in PRESETS.items())
_WIDTH_IN_FILES = 160
_SAMPLED = 2000
_QUICK = Measure(requests=300, seconds=10.0, precision=0.08)
_DEFAULT_LINK_GB_PER_S = 50.0


def plan(
    model: Annotated[Path, typer.Option(help="Directory, or a name on the Hugging Face hub; only its config is read.")],
    gpu: Annotated[str, typer.Option(help=f"GPU of every node: {', '.join(GPUS)}.")] = "h200",
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=COUNT_MAX, help="Number of GPUs. Default: as few as serve --rate.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Requests per second to serve; a trace's own by default.")
    ] = None,
    ttft: Annotated[str | None, typer.Option(help="Time to the first token, such as 400ms or 2s.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Mean time per token after the first, such as 15ms.")] = None,
    gap: Annotated[str | None, typer.Option(help="The 99th percentile of a request's own gaps between tokens.")] = None,
    share: Annotated[
        float, typer.Option(min=0.001, max=100, help="Percent of the requests that keep to the SLO.")
    ] = 100 * DEFAULT_SHARE,
    workload: Annotated[str, typer.Option(help=f"Lengths of prompts and outputs: {_PRESETS}.")] = "chat",
    input_tokens: Annotated[str | None, typer.Option("--input", help=f"Tokens of prompts, such as {_FORMS}.")] = None,
    output_tokens: Annotated[str | None, typer.Option("--output", help="Tokens of outputs, in the same forms.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace in place of lengths: Mooncake's .jsonl, Azure's .csv, or .xz of them.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="GPUs of one node. Default: as few as hold weights and a useful cache."),
    ] = None,
    attention_data_parallel: Annotated[
        bool,
        typer.Option(
            "--attention-data-parallel", help="Each rank holds the KV of its own requests, as the nodes' flag says."
        ),
    ] = False,
    redundant_experts: Annotated[
        int,
        typer.Option(
            min=0, max=1 << 16, help="Copies of experts in each layer of every node; they take memory from the cache."
        ),
    ] = 0,
    costs_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A live node whose measured step costs are used; twice: a prefill node and a decode node.",
        ),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="JSON with step costs, as `baton status --json` shows them.")
    ] = None,
    link_gb_per_s: Annotated[
        float,
        typer.Option(min=RATE_MIN, max=RATE_MAX, help="Speed at which KV goes from a prefill node to decode nodes."),
    ] = _DEFAULT_LINK_GB_PER_S,
    draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="ACCEPTED/DRAFTED",
            help="Mean draft tokens of a request that a step accepts and verifies, such as 0.9/1.4. Default: "
            "what the nodes of --costs-from have counted, and none otherwise.",
            show_default=False,
        ),
    ] = None,
    host_cache_gib: Annotated[
        float, typer.Option(min=0, max=COUNT_MAX, help="Host memory for KV of each GPU, as the nodes' flag says.")
    ] = 0.0,
    file_cache_gib: Annotated[
        float, typer.Option(min=0, max=COUNT_MAX, help="Files of KV of each GPU, as the nodes' flag says.")
    ] = 0.0,
    pull_ms: Annotated[
        float,
        typer.Option(min=0, max=RATE_MAX, help="Fixed time of a pull of KV from another node; with --host-cache-gib."),
    ] = 1e3 * ASSUMED_PULL.fixed_s,
    pull_gb_per_s: Annotated[
        float, typer.Option(min=RATE_MIN, max=RATE_MAX, help="Speed of a pull; `baton status` shows what nodes reach.")
    ] = 1e-9 / ASSUMED_PULL.byte_s,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter simulations, 8 % apart instead of 3.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find how many prefill and decode nodes a load needs, by simulation."""
    goal = _goal(ttft, tpot, gap, share)
    stores = StoreSizes(host_cache_gib, file_cache_gib)
    if file_cache_gib and not host_cache_gib:
        cure = "give --host-cache-gib too"
        raise InvalidRequest("files need host memory, through which their KV goes", field="host_cache_gib", cure=cure)
    shape = Shape(
        workload, input_tokens, output_tokens, trace, shared_prefix=0, shared_prefixes=1, sessions=0, tokens_max=None,
        arrivals=Arrivals.POISSON, burstiness=1.0, rate=rate, speed=None,
    )  # fmt: skip
    shape.check()
    directory = model_directory(model, weights=False)
    # Nodes have this layer by default, except with attention data parallelism.
    config = read_config(directory)
    if not attention_data_parallel:
        config = with_mtp(config)
    size = model_size(config, redundant_experts=redundant_experts)
    if attention_data_parallel:
        size = size.with_own_attention()
    load, own_rate = _fitting(shape, size.max_context_tokens)
    wanted = own_rate if rate is None and trace is not None and gpus is None else rate
    if wanted is None and gpus is None:
        raise InvalidRequest("neither a rate nor a number of GPUs", field="rate", cure="give --rate, --gpus, or both")
    kind, source = _kind(
        size, load, gpu_of(gpu), ranks=tensor_parallel_size, costs_from=costs_from, costs=costs,
        link_bytes_per_s=1e9 * link_gb_per_s,
    )  # fmt: skip
    kind = replace(kind, redundant_experts=redundant_experts)
    if draft_tokens is not None:
        kind = replace(kind, drafts=parse_drafts(draft_tokens))
        source = f"{source}; draft tokens given by --draft-tokens"
    measure = _QUICK if quick else Measure()
    pull_costs = PullCosts(pull_ms / 1e3, 1e-9 / pull_gb_per_s)
    question = Question(kind, load, goal, wanted, gpus, measure, host_cache_gib, pull_costs)
    with _progress() as on_step:
        found = find_plan(question, on_step=on_step)
    if as_json:
        typer.echo(json.dumps(to_json(found, model=str(model), costs=source, stores=stores), default=str))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    console.print(render(found, model=str(model), title=f"{shape.name}; {goal}", costs=source, stores=stores))


def _goal(ttft: str | None, tpot: str | None, gap: str | None, share: float) -> Goal:
    if not 0 < share <= 100:
        raise InvalidRequest(f"--share {share:g} is not above 0 and up to 100", field="share", value=share)
    if ttft is None:
        # NOTE: without this bound requests may wait for room for ever, so no rate is too high.
        raise InvalidRequest("no --ttft is given", field="slo", cure="give --ttft, such as 400ms, and perhaps --tpot")
    bounds = {"ttft_s": ttft, "tpot_s": tpot, "gap_s": gap}
    seconds = {name: parse_seconds(text) for name, text in bounds.items() if text is not None}
    return Goal(**seconds, share=share / 100)


def parse_seconds(text: str) -> float:
    """The seconds in a text such as `400ms`, `2s` or `50us`.

    Raises:
        InvalidRequest: it is not a time above 0.
    """
    for unit, factor in (("ms", 1e-3), ("us", 1e-6), ("s", 1.0)):
        number = text.strip().removesuffix(unit)
        if number != text.strip():
            try:
                seconds = float(number) * factor
            except ValueError:
                break
            if 0 < seconds < 1e6:
                return seconds
            break
    raise InvalidRequest(f"{text!r} is not a time above 0", field="slo", value=text, cure="give such as 400ms or 2s")


def _fitting(shape: Shape, context_tokens: int) -> tuple[Workload, float]:
    """The load without requests that exceed the model's context."""
    if shape.tokens_max is None:
        shape = Shape(**{**vars(shape), "tokens_max": context_tokens})
    load, rate = shape.build(())
    if isinstance(load, TraceReplay) and shape.rate is None:
        return load, load.rate
    return load, rate


def _kind(
    size: ModelSize,
    load: Workload,
    gpu: Gpu,
    *,
    ranks: int | None,
    costs_from: list[str] | None,
    costs: Path | None,
    link_bytes_per_s: float,
) -> tuple[NodeKind, str]:
    """The kind of node, and a text about the source of its costs."""
    if costs_from and costs is not None:
        raise InvalidRequest("--costs-from and --costs exclude each other", field="costs", cure="give one")
    if costs_from:
        return kind_from_nodes(costs_from, link_bytes_per_s=link_bytes_per_s), f"costs of {' and '.join(costs_from)}"
    requests = load.plan(1.0, LengthSpan(requests=_SAMPLED), 1)
    tokens = [request.prompt_tokens + request.output_tokens for request in requests]
    lengths = Lengths(sum(tokens) / len(tokens), max(tokens))
    kind = kind_by_roofline(size, gpu, lengths, ranks=ranks, link_bytes_per_s=link_bytes_per_s)
    if costs is None:
        return kind, f"costs by the data sheet of {gpu.name}, not measured"
    prefill, decode = read_costs(costs)
    return replace(kind, prefill=prefill, decode=decode), f"costs in {costs}"


@contextmanager
def _progress() -> Iterator[OnStep]:
    """A bar on stderr for the options, on a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task("planning", total=None)

        def on_step(what: str, done: int, total: int) -> None:
            shown.update(task, description=what, completed=done, total=total or None)

        yield on_step
