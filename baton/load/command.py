"""The command `baton bench`: its flags, and what they mean for a measurement."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.access import read_key, use
from baton.cli.output import check_output
from baton.core.limits import COUNT_MAX, DURATION_S_MIN, SECONDS_MAX, TOKENS_MAX
from baton.core.types import Slo
from baton.load.arrivals import Arrivals
from baton.load.goals import Goal, parse_goal
from baton.load.lengths import FORMS
from baton.load.plots import check_plot, plot
from baton.load.results import combined_results
from baton.load.runner import RunOptions, default_processes
from baton.load.session import ENDED_EARLY, Search, What, measured_results
from baton.load.shape import DEFAULT_RATE, Shape
from baton.load.tables import markdown
from baton.load.target import Api, Target
from baton.load.workload import PRESETS, LengthSpan
from baton.settings.environment import client_access

COMPARE = "compare"
_DURATION_S = 60.0
_WARMUP_S = 5.0
_RATE_MIN, _RATE_MAX = 0.001, 1e6
_FORMS = ", ".join(FORMS)
_PRESETS = "; ".join(f"{name} is {prompts} in, {outputs} out" for name, (prompts, outputs) in PRESETS.items())
_LOAD, _TIMES, _GOALS, _OUTPUT, _CLIENT = "Load", "When requests are sent", "Goals", "Results", "Client"


def bench(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="host:port of a Baton gateway (gRPC), or http://host:port of any server with OpenAI's API; "
            "LABEL=ADDRESS gives it a name; ADDRESS,ADDRESS are several gateways of the same nodes. "
            "Without one, a local cluster with a demo model is started. After the word "
            "`compare`: several addresses, which take turns under the same load, or JSON files of earlier runs.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help=f"Lengths of prompts and outputs: {_PRESETS}.",
            rich_help_panel=_LOAD,
        ),
    ] = "chat",
    input_tokens: Annotated[
        str | None, typer.Option("--input", help=f"Tokens of prompts, such as {_FORMS}.", rich_help_panel=_LOAD)
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option("--output", help="Tokens of outputs, in the same forms.", rich_help_panel=_LOAD)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay a trace: Mooncake's .jsonl, Azure's .csv, or lines of JSON with at_s, prompt_tokens, "
            "output_tokens and perhaps prefix_ids and prefix_tokens; also as .xz.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    shared_prefix: Annotated[
        int,
        typer.Option(min=0, max=TOKENS_MAX, help="Number of first tokens that prompts share.", rich_help_panel=_LOAD),
    ] = 0,
    shared_prefixes: Annotated[
        int,
        typer.Option(min=1, max=COUNT_MAX, help="How many different shared prefixes there are.", rich_help_panel=_LOAD),
    ] = 1,
    sessions: Annotated[
        int,
        typer.Option(
            min=0,
            max=COUNT_MAX,
            help="Conversations that take turns; each prompt continues its last one.",
            rich_help_panel=_LOAD,
        ),
    ] = 0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=TOKENS_MAX,
            help="Most tokens of prompt and output together; longer requests are drawn again, or left out of a trace. "
            "Default: the model's context, if the server reports it.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, help="Default: the server's own.", rich_help_panel=_LOAD)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=_RATE_MIN,
            max=_RATE_MAX,
            help=f"Requests per second. Default: {DEFAULT_RATE:g}; a trace's own.",
            rich_help_panel=_TIMES,
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            min=_RATE_MIN,
            max=_RATE_MAX,
            help="How much faster than recorded a trace is replayed.",
            rich_help_panel=_TIMES,
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals, typer.Option(help="Distribution of the times between requests.", rich_help_panel=_TIMES)
    ] = Arrivals.POISSON,
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1000,
            help="With gamma: squared coefficient of variation of the times between requests; 1 is Poisson, 4 comes in "
            "bursts.",
            rich_help_panel=_TIMES,
        ),
    ] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=SECONDS_MAX,
            help=f"Seconds of sending in each run. Default: {_DURATION_S:g}.",
            rich_help_panel=_TIMES,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, max=COUNT_MAX, help="Requests of each run, instead of a duration.", rich_help_panel=_TIMES),
    ] = None,
    warmup: Annotated[
        float,
        typer.Option(
            min=0, max=SECONDS_MAX, help="Seconds of load before the run, which do not count.", rich_help_panel=_TIMES
        ),
    ] = _WARMUP_S,
    seed: Annotated[
        int,
        typer.Option(
            min=-(2**63),
            max=2**63 - 1,
            help="The same seed sends requests of the same lengths at the same times.",
            rich_help_panel=_TIMES,
        ),
    ] = 0,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Bounds of a good request: ttft, tpot (mean per token after the first), gap (p99 of its gaps "
            "between tokens), e2e; and the share of good requests, 90 % by default. ttft=400ms,tpot=10/15/20ms is "
            "three goals. May be repeated.",
            rich_help_panel=_GOALS,
        ),
    ] = None,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate",
            help="Search for the highest rate that meets each --slo, from --rate on: doubling, then bisection, then a "
            "second run to confirm.",
            rich_help_panel=_GOALS,
        ),
    ] = False,
    precision: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Relative precision of the rate that is found.", rich_help_panel=_GOALS),
    ] = 0.05,
    max_runs: Annotated[
        int, typer.Option(min=1, max=10_000, help="Most runs of a search, for each address.", rich_help_panel=_GOALS)
    ] = 60,
    send_slo: Annotated[
        bool,
        typer.Option(
            "--send-slo",
            help="Send ttft and tpot of the only --slo with each request, for Baton.",
            rich_help_panel=_GOALS,
        ),
    ] = False,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, help="How often the addresses of `compare` take turns.", rich_help_panel=_GOALS
        ),
    ] = 3,
    json: Annotated[
        Path | None, typer.Option(help="File for every request and all numbers.", rich_help_panel=_OUTPUT)
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="PNG file; needs matplotlib.", rich_help_panel=_OUTPUT)
    ] = None,
    api: Annotated[
        Api | None, typer.Option(help="Default: grpc for host:port, completions for http.", rich_help_panel=_CLIENT)
    ] = None,
    model: Annotated[str, typer.Option(help="Default: the server's first one.", rich_help_panel=_CLIENT)] = "",
    api_key: Annotated[
        str,
        typer.Option(help="API key; @FILE reads it from a file. Default: BATON_API_KEY.", rich_help_panel=_CLIENT),
    ] = "",
    client_ca: Annotated[
        str | None,
        typer.Option(
            "--client-ca",
            help='PEM file with the CA of the server\'s certificate, or "system". Default: BATON_CLIENT_CA.',
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Client processes. Default: half of the cores.", rich_help_panel=_CLIENT),
    ] = None,
    connections: Annotated[
        int, typer.Option(min=1, max=1024, help="gRPC connections of each process.", rich_help_panel=_CLIENT)
    ] = RunOptions.connections,
    timeout: Annotated[
        float,
        typer.Option(
            min=DURATION_S_MIN, max=SECONDS_MAX, help="Seconds that a request may take.", rich_help_panel=_CLIENT
        ),
    ] = RunOptions.timeout_s,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            max=SECONDS_MAX,
            help="Seconds that requests may run on after the last was sent.",
            rich_help_panel=_CLIENT,
        ),
    ] = RunOptions.drain_s,
    late_ms: Annotated[
        float,
        typer.Option(
            min=DURATION_S_MIN,
            max=1e3 * SECONDS_MAX,
            help="The client counts as the limit if it sends later than this (p99).",
            rich_help_panel=_CLIENT,
        ),
    ] = 1e3 * RunOptions.bound_s,
) -> None:
    """Load a server with requests at times that do not depend on its answers, and report latency and goodput.

    Prints Markdown on stdout; after Ctrl-C or SIGTERM, with what was measured until then. Examples:

    baton bench 127.0.0.1:7000 --rate 20 --duration 60 --slo ttft=400ms,tpot=15ms

    baton bench http://127.0.0.1:8000 --api chat --workload long --find-rate --slo ttft=2s,tpot=10/15/20/30ms

    baton bench compare colocated=10.0.0.1:7000 split=10.0.0.2:7000 --trace conversation.jsonl.xz --plot both.png
    """
    goals = [goal for text in slo or [] for goal in parse_goal(text)]
    comparing, names = _targets(targets or [])
    if plot_file is not None:
        check_plot(plot_file)
    if json is not None:
        check_output(json, field="json")
    if names and all(map(_is_file, names)):
        results = combined_results(names, goals)
    else:
        _check_goals(goals, find_rate=find_rate, send_slo=send_slo)
        shape = Shape(
            workload, input_tokens, output_tokens, trace, shared_prefix, shared_prefixes, sessions, max_tokens,
            arrivals, burstiness, rate, speed,
        )  # fmt: skip
        shape.check()
        use(None, client_ca)
        key = read_key(api_key) or client_access().api_key or ""
        options = RunOptions(
            workload=shape.name, timeout_s=timeout, drain_s=drain, bound_s=late_ms / 1e3, connections=connections,
            slo=Slo(goals[0].ttft_s, goals[0].tpot_s) if send_slo else None, temperature=temperature,
        )  # fmt: skip
        search = Search(precision, max_runs) if find_rate else None
        what = What(goals, search, rounds if comparing else 1, seed)
        span = LengthSpan(_DURATION_S if duration is None and requests is None else duration, requests, warmup)
        given = [Target.parse(name, api=api, api_key=key, model=model) for name in names]
        results = measured_results(given, shape, span, options, what, processes or default_processes())
    print(markdown(results), flush=True)
    if json is not None:
        results.write(json)
    if plot_file is not None:
        plot(results, plot_file)
    if results.stopped:
        raise typer.Exit(ENDED_EARLY)


def _targets(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Returns whether targets are compared, and their addresses.

    Raises:
        BadParameter: too few or too many.
    """
    comparing = words[:1] == [COMPARE]
    names = list(words[1:] if comparing else words)
    if comparing and len(names) < 2:
        raise typer.BadParameter("give at least two addresses or files", param_hint=COMPARE)
    if not comparing and len(names) > 1:
        raise typer.BadParameter(f"for several, use `baton bench compare {' '.join(names)}`", param_hint="ADDRESS")
    return comparing, names


def _check_goals(goals: Sequence[Goal], *, find_rate: bool, send_slo: bool) -> None:
    if find_rate and not goals:
        raise typer.BadParameter("it needs a goal, such as --slo ttft=400ms,tpot=15ms", param_hint="--find-rate")
    if send_slo and len(goals) != 1:
        raise typer.BadParameter(f"it needs one goal; there are {len(goals)}", param_hint="--send-slo")


def _is_file(name: str) -> bool:
    return name.endswith(".json")
