"""Panels of curves over a size, as SVG: both axes logarithmic. Knows nothing of what the curves are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

_INCHES = 4.2
_MOST_ABREAST = 3
_OURS = "#2a7f62"
_OTHERS = ("#b3452c", "#3a5fa0", "#8a6d1d", "#7a4d8b", "#e08a3c", "#5aa0c8", "#c77fb0")


@dataclass(frozen=True)
class Panel:
    """Curves by their names, each a figure by size.

    Attributes:
        ours: the name of the one in our color.
        limits: what bounds them, drawn dashed.
    """

    title: str
    ours: str
    curves: Mapping[str, Mapping[float, float]]
    limits: Mapping[str, Mapping[float, float]]


def draw_panels(panels: Sequence[Panel], path: Path, *, x_label: str, y_label: str) -> None:
    """Writes an SVG; nothing without a panel."""
    if not panels:
        return
    width = min(_MOST_ABREAST, len(panels))
    height = -(-len(panels) // width)
    figure = Figure(figsize=(_INCHES * width, 0.8 * _INCHES * height), layout="constrained")
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(height, width, index + 1)
        colors, dashes = cycle(_OTHERS), cycle(("--", ":", "-."))
        for name, points in panel.curves.items():
            color = _OURS if name == panel.ours else next(colors)
            axes.plot(*_sorted(points), "o-", label=name, color=color, ms=3)
        for name, points in panel.limits.items():
            axes.plot(*_sorted(points), linestyle=next(dashes), color="black", label=name, lw=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")  # numbers as people write them, not powers
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(fontsize=7)
    with rc_context({"svg.fonttype": "none"}):  # text as text: a tenth of the size
        figure.savefig(path, format="svg", metadata={"Date": None})


def _sorted(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    sizes = sorted(points)
    return sizes, [points[size] for size in sizes]
