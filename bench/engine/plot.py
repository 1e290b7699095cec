"""Draws the engine's figures: decode steps over the batch, with the roofline."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.curves import Panel, draw_panels
from bench.table import Row

_POINT = re.compile(r"(?P<model>[^,]+), batch (?P<batch>\d+), context (?P<context>\d+)")
_OURS = "graphs"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes an SVG with one panel for each model and context: time of a step over the batch."""
    curves: dict[tuple[str, int], dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    limits: dict[tuple[str, int], dict[float, float]] = defaultdict(dict)
    for row in rows:
        point = _POINT.fullmatch(row.work)
        if row.name.startswith("decode step") and point is not None:
            where, batch = (point["model"], int(point["context"])), int(point["batch"])
            name = row.name.removeprefix("decode step").lstrip(", ") or _OURS
            curves[where][name][batch] = row.measured
            if name == _OURS and row.rival_measured:
                limits[where][batch] = row.rival_measured
    panels = [
        Panel(f"{model}, context {context}", _OURS, named, {"roofline": limits[model, context]})
        for (model, context), named in sorted(curves.items())
    ]
    draw_panels(panels, path, x_label="batch", y_label="ms per step")
