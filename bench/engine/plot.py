"""Draws the engine's figures: decode steps over the batch, beside the roofline. Measures nothing."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.table import Row

_POINT = re.compile(r"(?P<model>[^,]+), batch (?P<batch>\d+), context (?P<context>\d+)")
_INCHES = 4.2
_OURS, _OTHERS = "#2a7f62", ("#b3452c", "#3a5fa0", "#8a6d1d", "#7a4d8b")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes an SVG with one panel for each model and context: time of a step over the batch, both logarithmic."""
    panels: dict[tuple[str, int], dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        point = _POINT.fullmatch(row.work)
        if row.name.startswith("decode step") and point is not None:
            panel = panels[point["model"], int(point["context"])]
            panel[row.name.removeprefix("decode step").lstrip(", ") or "graphs"][int(point["batch"])] = row
    width = max(1, min(3, len(panels)))
    height = -(-len(panels) // width)
    figure = Figure(figsize=(_INCHES * width, 0.8 * _INCHES * height), layout="constrained")
    for index, ((model, context), curves) in enumerate(sorted(panels.items())):
        axes = figure.add_subplot(height, width, index + 1)
        colors = iter(_OTHERS * 2)
        for name, points in curves.items():
            batches = sorted(points)
            color = _OURS if name == "graphs" else next(colors)
            axes.plot(batches, [points[batch].measured for batch in batches], "o-", label=name, color=color, ms=3)
        limits = {batch: row.rival_measured for batch, row in curves["graphs"].items() if row.rival_measured}
        axes.plot(sorted(limits), [limits[batch] for batch in sorted(limits)], "k--", label="roofline", lw=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{model}, context {context}", fontsize=9)
        axes.set_xlabel("batch")
        axes.set_ylabel("ms per step")
        axes.legend(fontsize=7)
    with rc_context({"svg.fonttype": "none"}):  # text as text: a tenth of the size
        figure.savefig(path, format="svg", metadata={"Date": None})
