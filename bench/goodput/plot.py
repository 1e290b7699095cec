"""The highest rates of a search as bars, one panel for each bounded latency, as SVG."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.goodput.deployments import COLOCATED, ELASTIC, STATIC
from bench.goodput.search import GAP, MEAN
from bench.table import Row

_NAME = re.compile(rf"goodput, TTFT \S+ ms, (?P<bound>{MEAN}|{GAP}) (?P<tpot>\S+) ms")
_COLORS = {COLOCATED: "#8a8a8a", STATIC: "#3a5fa0", ELASTIC: "#2a7f62"}
_TITLES = {MEAN: "mean time per token", GAP: "p99 gap of a request"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Does nothing without rows of a search."""
    rates: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found = _NAME.fullmatch(row.name)
        if found:
            tpot_ms = float(found["tpot"])
            rates[found["bound"]][ELASTIC][tpot_ms] = row.measured
            rates[found["bound"]][row.rival][tpot_ms] = row.rival_measured or 0.0
    if not rates:
        return
    figure = Figure(figsize=(4.2 * len(rates), 3.6), layout="constrained")
    for place, (bound, deployments) in enumerate(rates.items()):
        axes = figure.add_subplot(1, len(rates), place + 1)
        width = 0.8 / len(deployments)
        for number, name in enumerate(_COLORS):
            points = sorted(deployments[name].items())
            lefts = [index + (number - 1) * width for index in range(len(points))]
            bars = axes.bar(lefts, [rate for _, rate in points], width, color=_COLORS[name], label=name)
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_xticks(range(len(points)), [f"{tpot_ms:g} ms" for tpot_ms, _ in points])
        axes.set_title(f"SLO on the {_TITLES[bound]}", fontsize=9)
        axes.set_ylabel("requests/s that 90 % of requests meet")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
