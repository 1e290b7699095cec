"""Draws attention figures: our speed as a share of each rival's, point by point. Measures nothing."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.table import Row

_ROW_INCHES = 0.3
_WIDTH_INCHES = 10.0
_REACHED, _MISSED = "#2a7f62", "#b3452c"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes an SVG of all rows that have a rival and a goal: a bar each, and the goal as a mark on it."""
    shown = [(row, row.share, row.goal) for row in rows if row.share is not None and row.goal is not None][::-1]
    figure = Figure(figsize=(_WIDTH_INCHES, 1.0 + _ROW_INCHES * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    axes.barh(
        places, [share for _, share, _ in shown], color=[_REACHED if row.reached else _MISSED for row, _, _ in shown]
    )
    axes.scatter([goal for _, _, goal in shown], places, marker="|", s=120, color="black", zorder=2, label="goal")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks(places, [f"{row.name}: {row.work} / {row.rival}" for row, _, _ in shown], fontsize=7)
    axes.set_xlabel("share of the rival")
    axes.set_ylim(-1, len(shown))
    axes.legend(loc="lower right")
    with rc_context({"svg.fonttype": "none"}):  # text as text: a tenth of the size
        figure.savefig(path, format="svg", metadata={"Date": None})
