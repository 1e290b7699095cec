"""Shows results as Markdown: one run, a comparison of several deployments, or the rates that a search found. Pure."""

from collections.abc import Callable, Iterable, Sequence

from baton.load.goals import Goal
from baton.load.metrics import Spread, Summary, summarize
from baton.load.results import Found, LoadResults, Run

_SPREADS: tuple[tuple[str, Callable[[Summary], Spread | None]], ...] = (
    ("TTFT", lambda summary: summary.ttft),
    ("TPOT, mean of a request", lambda summary: summary.tpot),
    ("gap between tokens", lambda summary: summary.gap),
    ("p99 gap of a request", lambda summary: summary.gap_p99),
    ("end to end", lambda summary: summary.e2e),
)


def markdown(results: LoadResults) -> str:
    """The whole report, without a newline at the end."""
    parts = []
    if results.found:
        parts.append(rates_table(results.found))
    elif len(results.labels) > 1:
        parts.append(comparison_table(results))
    else:
        parts += [run_report(run, results.goals) for run in results.runs]
    return "\n\n".join([*parts, *_remarks(results)])


def run_report(run: Run, goals: Sequence[Goal]) -> str:
    """The report of one run: times, outcomes of the requests, goals."""
    summary = run.summary
    rows = [
        [name, *(_ms(value) for value in (each.mean, each.p50, each.p90, each.p95, each.p99, each.max))]
        for name, of in _SPREADS
        if (each := of(summary)) is not None
    ]
    lines = [
        f"{run.label}: {run.workload}, {run.rate:g} requests/s planned",
        "",
        _table(["ms", "mean", "p50", "p90", "p95", "p99", "max"], rows),
        "",
        f"- {_outcomes(summary)}",
        f"- {summary.requests_per_s:.2f} requests/s answered, {summary.output_tokens_per_s:.0f} tokens/s; "
        f"{summary.prompt_tokens} tokens in ({summary.cached_tokens} cached), {summary.output_tokens} out",
    ]
    if summary.merged:
        lines.append(f"- {100 * summary.merged:.1f} % of tokens came together with others: their gaps count as 0")
    lines += [f"- {goal_line(goal, good, summary)}" for goal, good in zip(goals, run.good(goals), strict=True)]
    return "\n".join(lines)


def goal_line(goal: Goal, good: int, summary: Summary) -> str:
    met = "met" if good >= goal.share * summary.requests else "missed"
    share, per_s = 100 * good / summary.requests, good / summary.window_s
    return f"{goal}: {met}, {good} of {summary.requests} good ({share:.1f} %), goodput {per_s:.2f}/s"


def comparison_table(results: LoadResults) -> str:
    """A row for each number, a column for each deployment with its ratio to the first one's.

    Where there were several rounds, the lowest and the highest ratio of one round follow.
    """
    labels = results.labels
    runs = {label: [run for run in results.runs if run.label == label] for label in labels}
    first, *others = labels
    rows = []
    for name, of in _numbers(results.goals):
        values = {label: of(runs[label]) for label in labels}
        row = [name, _shown(values[first])]
        for label in others:
            row += [_shown(values[label]), _ratio(of, values, runs, first, label)]
        rows.append(row)
    header = ["", first, *(cell for label in others for cell in (label, f"{label} / {first}"))]
    return _table(header, rows)


def rates_table(found: Sequence[Found]) -> str:
    """A row for each deployment, a column for each goal: requests per second, and the ratio to the first row's."""
    goals = list(dict.fromkeys(each.goal for each in found))
    labels = list(dict.fromkeys(each.label for each in found))
    by_cell = {(each.label, each.goal): each for each in found}
    rows = []
    for label in labels:
        cells = [label]
        for goal in goals:
            each, first = by_cell.get((label, goal)), by_cell.get((labels[0], goal))
            cells.append("" if each is None else _rate(each, None if label == labels[0] else first))
        rows.append(cells)
    return _table(["requests/s", *map(str, goals)], rows)


def _rate(found: Found, first: Found | None) -> str:
    least = "" if found.at_most else "at least "
    ratio = f" ({found.rate / first.rate:.2f}x)" if first is not None and first.rate else ""
    return f"{least}{found.rate:.3g}{ratio}{'' if found.complete else ' (not confirmed)'}"


_Number = Callable[[Sequence[Run]], float | None]


def _numbers(goals: Sequence[Goal]) -> Iterable[tuple[str, _Number]]:
    def quantile(of: Callable[[Summary], Spread | None], name: str) -> _Number:
        def number(runs: Sequence[Run]) -> float | None:
            found = of(_pooled(runs))
            return None if found is None else 1e3 * float(getattr(found, name))

        return number

    for name, of in _SPREADS:
        for each in ("p50", "p99", "max") if name.startswith("gap") else ("p50", "p99"):
            yield f"{name}, {each}, ms", quantile(of, each)
    yield "answered requests/s", lambda runs: _pooled(runs).requests_per_s
    yield "output tokens/s", lambda runs: _pooled(runs).output_tokens_per_s
    for goal in goals:
        yield f"good, {goal}, %", lambda runs, goal=goal: _good_share(runs, goal)  # type: ignore[misc]
    yield "refused", lambda runs: _pooled(runs).refused
    yield "failed or not finished", lambda runs: _pooled(runs).failed + _pooled(runs).unfinished


def _pooled(runs: Sequence[Run]) -> Summary:
    return summarize(*(run.records for run in runs))


def _good_share(runs: Sequence[Run], goal: Goal) -> float:
    counted = [record for run in runs for record in run.counted]
    return 100 * goal.count(counted) / len(counted)


def _ratio(of: _Number, values: dict[str, float | None], runs: dict[str, list[Run]], first: str, label: str) -> str:
    whole = _divided(values[label], values[first])
    if whole is None:
        return ""
    pairs = zip(runs[label], runs[first], strict=False)
    rounds = [ratio for ours, theirs in pairs if (ratio := _divided(of([ours]), of([theirs]))) is not None]
    return f"{whole:.2f}x" + (f" ({min(rounds):.2f}-{max(rounds):.2f})" if len(rounds) > 1 else "")


def _divided(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _outcomes(summary: Summary) -> str:
    parts = [f"{summary.requests} requests: {summary.ok} answered"]
    if summary.short:
        parts.append(f"{summary.short} of them with fewer tokens than asked for")
    for name, count, types in (
        ("refused", summary.refused, summary.refusals),
        ("failed", summary.failed, summary.errors),
        ("not finished in time", summary.unfinished, {}),
    ):
        if count:
            kinds = ", ".join(f"{kind} {number}" for kind, number in types.items())
            parts.append(f"{count} {name}" + (f" ({kinds})" if kinds else ""))
    return ", ".join(parts)


def _remarks(results: LoadResults) -> list[str]:
    """Remarks on the client and on the servers, each once."""
    limited = [run for run in results.runs if run.client.was_the_limit]
    lines = dict.fromkeys(f"- {run.label}: {note}" for run in results.runs for note in run.notes)
    if limited:
        worst = max(limited, key=lambda run: max(run.client.late_p99_s, run.client.lag_p99_s))
        of = f" in {len(limited)} of {len(results.runs)} runs" if len(results.runs) > 1 else ""
        lines[f"- {worst.client}{of}"] = None
    elif results.runs:
        lines[f"- {max((run.client for run in results.runs), key=lambda client: client.late_p99_s)}"] = None
    return ["\n".join(lines)] if lines else []


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads well on a terminal too."""
    every = [header, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    lines = ["| " + " | ".join(_cells(row, widths)) + " |" for row in every]
    rule = "|" + "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if column else cell.ljust(width)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:.1f}"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.2f}"
