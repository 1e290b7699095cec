"""Draws transfers: GB/s over the size of messages or over the length of prompts."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.curves import Panel, draw_panels
from bench.table import Row

_MESSAGES = re.compile(r"(?P<size>\d+) (?P<unit>KiB|MiB) messages over (?P<lanes>.+)")
_PROMPT = re.compile(r"(?P<tokens>\d+) tokens of (?P<model>[^,]+), (?P<ends>.+)")
_KIB = {"KiB": 1, "MiB": 1024}
_OURS = "Baton"
_NO_LIMIT = "equal ends"

_Curves = dict[str, dict[str, dict[float, float]]]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes an SVG: one panel for rows of the transport alone, or one per model for rows between caches."""
    messages = [row for row in rows if row.name == "transport"]
    if messages:
        _draw_messages(messages, path)
    else:
        _draw_prompts([row for row in rows if row.name == "cache to cache"], path)


def _draw_messages(rows: Sequence[Row], path: Path) -> None:
    curves: _Curves = defaultdict(lambda: defaultdict(dict))
    limits: _Curves = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        point = _MESSAGES.fullmatch(row.work)
        if point is None or row.rival_measured is None:
            continue
        where, size = f"messages over {point['lanes']}", int(point["size"]) * _KIB[point["unit"]]
        curves[where][_OURS][size] = row.measured
        others = limits if row.rival == "memcpy" else curves
        others[where][row.rival][size] = row.rival_measured
    panels = [Panel(where, _OURS, named, limits[where]) for where, named in curves.items()]
    draw_panels(panels, path, x_label="KiB of a message", y_label="GB/s")


def _draw_prompts(rows: Sequence[Row], path: Path) -> None:
    """Each model's first row has its equal ends. Curves with one point are left out."""
    curves: _Curves = defaultdict(lambda: defaultdict(dict))
    limits: _Curves = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        point = _PROMPT.fullmatch(row.work)
        if point is None:
            continue
        model, tokens = point["model"], int(point["tokens"])
        curves[model][point["ends"]][tokens] = row.measured
        if row.rival_measured and row.rival != _NO_LIMIT:
            limits[model].setdefault(row.rival, {}).setdefault(tokens, row.rival_measured)
    panels = []
    for model, named in curves.items():
        drawn = {name: points for name, points in named.items() if len(points) > 1}
        panels.append(Panel(model, next(iter(named)), drawn, limits[model]))
    draw_panels(panels, path, x_label="tokens of the prompt", y_label="GB/s")
