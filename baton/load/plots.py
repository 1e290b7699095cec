"""Draws results as PNG. matplotlib is imported at use, because only plots need it."""

import io
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from baton.cli.output import check_output, write_output
from baton.core.errors import ConfigError, InvalidRequest
from baton.load.records import LoadOutcome, LoadRecord
from baton.load.results import Found, LoadResults

_DPI = 150
_MARKERS = "osD^vP*X"


def check_plot(path: Path) -> None:
    """Checks the plot's file and matplotlib before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed.
        InvalidRequest: the file is no PNG, or its directory does not exist.
    """
    if path.suffix != ".png":
        cure = "give a name that ends in .png"
        raise InvalidRequest(f"the plot {path} is no PNG", field="plot", value=path, cure=cure)
    check_output(path, field="plot")
    _figure_module()


def plot(results: LoadResults, path: Path) -> None:
    """Draws the rates of a search; without a search distributions, with one line for each deployment.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = _rates(results.found, results) if results.found else _distributions(results)
    png = io.BytesIO()
    figure.savefig(png, dpi=_DPI)
    write_output(path, png.getvalue(), field="plot")


def _figure_module() -> ModuleType:
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigError("plots need matplotlib", field="plot", cure="pip install 'baton-serving[tools]'") from None
    return matplotlib.figure


def _distributions(results: LoadResults) -> Any:
    figure = _figure_module().Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    (ttft, tpot), (gap, course) = axes
    for label in results.labels:
        runs = [run for run in results.runs if run.label == label]
        records = [record for run in runs for record in run.counted if record.outcome is LoadOutcome.OK]
        _steps(ttft, label, [record.ttft_s for record in records if record.ttft_s is not None])
        _steps(tpot, label, [record.tpot_s for record in records if record.tpot_s is not None])
        _steps(gap, label, np.concatenate([record.gaps_s() for record in records]) if records else [])
        _course(course, label, records)
    for axis, title in ((ttft, "TTFT"), (tpot, "TPOT, mean of a request"), (gap, "gaps between tokens")):
        axis.set(title=title, xlabel="ms", ylabel="share of requests" if axis is not gap else "share of gaps")
        axis.set_ylim(0, 1)
        axis.set_xlim(left=0)
    for axis, bounds in (
        (ttft, {goal.ttft_s for goal in results.goals}),
        (tpot, {goal.tpot_s for goal in results.goals}),
    ):
        for bound in bounds:
            if bound is not None:
                axis.axvline(1e3 * bound, color="0.6", linestyle="--", linewidth=1)
    gap.set_xscale("symlog", linthresh=1.0)
    gap.set_xlim(left=0)
    course.set(title="TTFT in the course of the run", xlabel="s after the start", ylabel="ms")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    if ttft.get_legend_handles_labels()[0]:
        ttft.legend(loc="lower right")
    run = results.runs[0]
    figure.suptitle(f"{run.workload}, {run.rate:g} requests/s")
    return figure


def _steps(axis: Any, label: str, seconds: Sequence[float] | np.ndarray[Any, Any]) -> None:
    """Draws the cumulative distribution."""
    values = np.sort(np.asarray(seconds, np.float64)) * 1e3
    if values.size:
        axis.step(values, np.arange(1, values.size + 1) / values.size, where="post", label=label)


def _course(axis: Any, label: str, records: Sequence[LoadRecord]) -> None:
    found = [(record.due_s, 1e3 * record.ttft_s) for record in records if record.ttft_s is not None]
    if found:
        axis.plot(*zip(*sorted(found), strict=True), ".", markersize=3, label=label)


def _rates(found: Sequence[Found], results: LoadResults) -> Any:
    """Draws on the left the rate that each goal allows, on the right the share of good requests at each measured
    rate."""
    figure = _figure_module().Figure(figsize=(11, 4.5), layout="constrained")
    bars, shares = figure.subplots(1, 2)
    goals = list(dict.fromkeys(each.goal for each in found))
    labels = list(dict.fromkeys(each.label for each in found))
    width = 0.8 / len(labels)
    for place, label in enumerate(labels):
        rates = [next((each.rate for each in found if (each.label, each.goal) == (label, goal)), 0.0) for goal in goals]
        lefts = [index + (place - (len(labels) - 1) / 2) * width for index in range(len(goals))]
        bars.bar_label(bars.bar(lefts, rates, width, label=label), fmt="%.3g")
        runs = sorted((run for run in results.runs if run.label == label), key=lambda run: run.rate)
        for goal, marker in zip(goals, _MARKERS * len(goals), strict=False):
            place_of_goal = results.goals.index(goal)
            points = [(run.rate, 100 * run.good(results.goals)[place_of_goal] / run.summary.requests) for run in runs]
            name = f"{label}: {goal}" if len(found) > 1 else str(goal)
            shares.plot(*zip(*points, strict=True), marker=marker, color=f"C{place}", label=name, linewidth=1)
    bars.set_xticks(range(len(goals)), [str(goal).replace(", ", "\n") for goal in goals], fontsize=8)
    bars.set(ylabel="requests/s", title="highest rate that meets the goal")
    shares.set(xlabel="requests/s", ylabel="good requests, %", title="every measured rate")
    for share in {100 * goal.share for goal in goals}:
        shares.axhline(share, color="0.6", linestyle="--", linewidth=1)
    for axis in (bars, shares):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure
