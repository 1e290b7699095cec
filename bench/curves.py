"""Panels of curves over a size, as SVG. Both axes are logarithmic, and the legend is below each panel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter

_INCHES = 4.2
_MOST_ABREAST = 3
_OURS = "#2a7f62"
_OTHERS = ("#b3452c", "#3a5fa0", "#8a6d1d", "#7a4d8b", "#e08a3c", "#5aa0c8", "#c77fb0")


@dataclass(frozen=True)
class Panel:
    """Curves by name; each maps a size to a figure.

    Attributes:
        ours: name of the curve in our color.
        limits: bounds of the curves; drawn dashed.
    """

    title: str
    ours: str
    curves: Mapping[str, Mapping[float, float]]
    limits: Mapping[str, Mapping[float, float]]


def draw_panels(panels: Sequence[Panel], path: Path, *, x_label: str, y_label: str) -> None:
    """Writes an SVG. Does nothing without panels."""
    if not panels:
        return
    width = min(_MOST_ABREAST, len(panels))
    height = -(-len(panels) // width)
    figure = Figure(figsize=(_INCHES * width, 0.95 * _INCHES * height), layout="constrained")
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
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _short(size)))
        axes.yaxis.set_major_formatter("{x:g}")  # plain numbers, not powers
        axes.yaxis.set_minor_formatter(_PlainLogFormatter(minor_thresholds=(1, 0.4)))
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False)
    with rc_context({"svg.fonttype": "none"}):  # text instead of outlines makes the file ten times smaller
        figure.savefig(path, format="svg", metadata={"Date": None})


class _PlainLogFormatter(LogFormatter):
    """Labels minor ticks of short axes as 0.6 instead of 6e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _short(size: float) -> str:
    """Writes multiples of 1024 from 4096 on as 8k, because longer labels would overlap."""
    return f"{size / 1024:g}k" if size >= 4096 and size % 1024 == 0 else f"{size:g}"


def _sorted(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    sizes = sorted(points)
    return sizes, [points[size] for size in sizes]
