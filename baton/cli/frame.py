"""Renders a cluster's view as one frame of `baton top`, fitted to the terminal's width and height. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from baton.cli.cluster_sections import cluster_sections
from baton.cli.cluster_view import ClusterView
from baton.cli.frame_texts import seconds, state_color, text_line

_HEIGHTS = "▁▂▃▄▅▆▇█"
_SPARKS = 24
_WIDTH_MAX = 10_000
_LATEST_S = 32_503_680_000  # the year 3000


@dataclass(frozen=True)
class Frame:
    """One frame of the display.

    Args:
        view: the latest view; None before the first one arrived.
        before: the view before it, from which rates are computed.
        trouble: why the gateway does not answer; empty if it does.
        age_s: age of `view`.
        whole: show all rows, even if the terminal has fewer lines.
    """

    view: ClusterView | None
    before: ClusterView | None = None
    trouble: str = ""
    age_s: float = 0.0
    whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, height = options.max_width, None if self.whole else console.size.height
        head = list(self._head())
        if self.whole:
            for line in head:
                line.no_wrap, line.overflow = False, "fold"
        yield from head if height is None else head[:height]
        if self.view is None:
            return
        sections = cluster_sections(self.view, self.before, width, whole=self.whole)
        wanted = [section.lines for section in sections]
        given = wanted if height is None else shares(height - len(head), wanted)
        for section, lines in zip(sections, given, strict=True):
            yield from section.render(lines)

    def least_width(self, console: Console) -> int:
        """Returns the least width at which the whole frame shows every value in one piece, except reasons."""
        drawn = self.__rich_console__(console, console.options)
        tables = (each for each in drawn if isinstance(each, Table))
        unbounded = console.options.update(max_width=_WIDTH_MAX)
        return max((Measurement.get(console, unbounded, table).minimum for table in tables), default=0)

    def _head(self) -> Iterator[Text]:
        view = self.view
        if view is None:
            yield Text(f"no answer yet: {self.trouble}", "bold red")
            return
        if self.trouble:
            yield text_line((f"{self.age_s:.0f} s old; no answer: {self.trouble}", "bold red"))
        ready = any(node.state == "ready" for node in view.nodes)
        state = "draining" if view.draining else "serving" if ready else "no node is ready"
        model = f"  {view.model}  {view.version}  "
        yield text_line((view.gateway, "bold"), model, (state, state_color(state)), f"  {_clock(view.now_s)}")
        totals = view.totals
        yield text_line(
            (f"{totals.running} running  {totals.waiting} waiting", "bold"),
            f"  {totals.finished} finished  ",
            (f"{totals.failed} failed", "red" if totals.failed else ""),
            f"  {totals.refused} refused  {totals.remote} remote  {totals.local} local  ",
            f"{totals.workers} worker{'' if totals.workers == 1 else 's'}{_busy(view)}",
        )
        charts = view.charts
        yield _percentiles("TTFT", charts.ttft_p50, charts.ttft_p99)
        yield _percentiles("gap ", charts.gap_p50, charts.gap_p99)
        rate = charts.tokens_per_s[-1] if charts.tokens_per_s else None
        yield text_line(f"{rate or 0.0:.0f} tokens/s, as the percentiles in the last {charts.window_s:.0f} s")
        if view.mixed:
            yield text_line((view.mixed, "yellow"))


def _busy(view: ClusterView) -> str:
    """How busy the busiest worker is; empty for a gateway that does not report it."""
    if not view.workers:
        return ""
    return f" {100 * max(worker.busy_share for worker in view.workers):.0f} % busy"


def shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Divides lines fairly among sections: each gets what it wants or an equal share, whichever is less."""
    given, left = [0] * len(wanted), max(0, room)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for place, index in enumerate(order):
        given[index] = min(wanted[index], left // (len(order) - place))
        left -= given[index]
    return given


def _percentiles(name: str, p50: Sequence[float | None], p99: Sequence[float | None]) -> Text:
    last = [values[-1] if values else None for values in (p50, p99)]
    return text_line(
        (name, "bold"), f"  p50 {seconds(last[0]):>8}  p99 {seconds(last[1]):>8}  ", (_sparks(p99[-_SPARKS:]), "cyan")
    )


def _sparks(values: Sequence[float | None]) -> str:
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return ""
    top = len(_HEIGHTS) - 1
    return "".join(" " if value is None else _HEIGHTS[round(max(0.0, value) / most * top)] for value in values)


def _clock(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(min(max(unix_s, 0.0), _LATEST_S), UTC):%H:%M:%S} UTC"
