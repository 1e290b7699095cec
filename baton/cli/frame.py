"""Renders a cluster's view as one frame of `baton top`, fitted to the terminal's width and height. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from baton.cli.cluster_view import ClusterView, ShownLink, ShownNode, ShownRequest

Row = TypeVar("Row")

_COLORS = {"ready": "green", "serving": "green", "draining": "yellow", "connecting": "yellow"}  # others: red
_HEIGHTS = "▁▂▃▄▅▆▇█"
_SPARKS = 24
_NOTHING = "-"
_WIDTH_MAX = 10_000
_REASON_WIDTH = 24  # least width of reasons, which continue on further lines
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
        sections = _sections(self.view, self.before, width, whole=self.whole)
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
            yield _line((f"{self.age_s:.0f} s old; no answer: {self.trouble}", "bold red"))
        ready = any(node.state == "ready" for node in view.nodes)
        state = "draining" if view.draining else "serving" if ready else "no node is ready"
        model = f"  {view.model}  {view.version}  "
        yield _line((view.gateway, "bold"), model, (state, _color(state)), f"  {_clock(view.now_s)}")
        totals = view.totals
        yield _line(
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
        yield _line(f"{rate or 0.0:.0f} tokens/s, as the percentiles in the last {charts.window_s:.0f} s")
        if view.mixed:
            yield _line((view.mixed, "yellow"))


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


# ---- sections


@dataclass(frozen=True)
class _Column(Generic[Row]):
    """A column, shown unless all its cells are empty.

    Args:
        from_width: least terminal width that shows the column.
        shrinks: whether its cells are cut first if the width does not suffice.
    """

    title: str
    cell: Callable[[Row], str | Text]
    from_width: int = 0
    right: bool = True
    shrinks: bool = False


@dataclass(frozen=True)
class _Section(Generic[Row]):
    """A table. `first` has its rows in order of importance, for when not all of them fit."""

    name: str
    columns: Sequence[_Column[Row]]
    rows: Sequence[Row]
    first: Sequence[Row]
    empty: str
    width: int
    whole: bool

    @property
    def lines(self) -> int:
        """Lines of the whole section: an empty one, the titles, and the rows."""
        return 2 + max(len(self.rows), 1)

    def render(self, lines: int) -> Iterator[RenderableType]:
        if lines < 3:
            return
        yield Text()
        if not self.rows:
            yield _line((self.empty, "dim"))
            return
        left_out = len(self.rows) - (lines - 2)
        if left_out <= 0:
            yield self._table(self.rows)
            return
        shown = self.first[: lines - 3]
        if shown:
            yield self._table(shown)
        more = len(self.rows) - len(shown)
        yield _line((f"{more} more {self.name}" if shown else f"{more} {self.name}", "dim"))

    def _table(self, rows: Sequence[Row]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        shown = [column for column in self.columns if self.width >= column.from_width]
        cells = [[_text(column.cell(row), one_line=not self.whole) for row in rows] for column in shown]
        for column, texts in zip(shown, cells, strict=True):
            if any(texts):
                table.add_column(
                    column.title,
                    justify="right" if column.right else "left",
                    no_wrap=not column.shrinks and not self.whole,
                    overflow="fold" if self.whole else "ellipsis",
                    min_width=_least_width(column, texts) if self.whole else None,
                    max_width=None if column.shrinks or self.whole else max(8, self.width // 4),
                )
        for row in zip(*(texts for texts in cells if any(texts)), strict=True):
            table.add_row(*row)
        return table


def _least_width(column: _Column[Any], texts: Sequence[Text]) -> int:
    """The least width of a column in a frame that shows everything."""
    longest = max(each.cell_len for each in (Text(column.title), *texts))
    return min(longest, _REASON_WIDTH) if column.shrinks else longest


def _sections(view: ClusterView, before: ClusterView | None, width: int, *, whole: bool) -> Sequence["_Section[Any]"]:
    nodes = sorted(view.nodes, key=lambda node: (node.role != "prefill", node.role, node.name))
    links = sorted(view.links, key=lambda link: (_name(view, link.prefill, ""), _name(view, link.decode, link.peer)))
    rates = _rates(view, before)
    slow = [request for request in view.requests if request.slow]
    by_trouble = sorted(nodes, key=lambda node: node.state == "ready")
    by_rate = sorted(links, key=lambda link: (link.state == "ready", -rates.get(_key(view, link), 0.0)))
    none_slow = f"none of the last {len(view.requests)} requests was slow or failed"
    return (
        _Section("nodes", _node_columns(), nodes, by_trouble, "no node is known", width, whole),
        _Section("links", _link_columns(view, rates), links, by_rate, "no link is known", width, whole),
        _Section("slow requests", _request_columns(view), slow, slow, none_slow, width, whole),
    )


def _node_columns() -> Sequence[_Column[ShownNode]]:
    return (
        _Column("node", lambda node: node.name, right=False),
        _Column("role", lambda node: node.role, right=False),
        _Column("state", lambda node: Text(node.state, _color(node.state)), right=False),
        _Column("KV", _kv),
        _Column("seats", lambda node: f"{node.rows if node.role == 'decode' else node.running}/{node.seats}"),
        _Column("waiting", lambda node: str(node.waiting), from_width=60),
        _Column("backlog", lambda node: _seconds(node.backlog_s), from_width=70),
        _Column("step", lambda node: _seconds(node.step_s), from_width=80),
        _Column("kept", _kept, from_width=110, right=False),
        _Column("version", lambda node: node.version, from_width=90, right=False),
        _Column("revision", lambda node: node.revision_name or node.revision, from_width=100, right=False),
        _Column("address", lambda node: node.address, from_width=120, right=False),
        _Column("why", lambda node: node.detail, from_width=60, right=False, shrinks=True),
    )


def _link_columns(view: ClusterView, rates: dict[tuple[str, str], float]) -> Sequence[_Column[ShownLink]]:
    return (
        _Column("link from", lambda link: _name(view, link.prefill, ""), right=False),
        _Column("to", lambda link: _name(view, link.decode, link.peer), right=False),
        _Column("state", lambda link: Text(link.state, _color(link.state)), right=False),
        _Column("GB/s", lambda link: f"{link.gigabytes_per_s:.2f}"),
        _Column("MB/s now", lambda link: _megabytes(rates.get(_key(view, link))), from_width=60),
        _Column("us", lambda link: f"{link.latency_s * 1e6:.0f}", from_width=70),
        _Column("sent", lambda link: _bytes(link.bytes_total), from_width=80),
        _Column("transport", lambda link: link.transport, from_width=90, right=False),
        _Column("why", lambda link: link.detail, from_width=100, right=False, shrinks=True),
    )


def _request_columns(view: ClusterView) -> Sequence[_Column[ShownRequest]]:
    return (
        _Column("slow request", lambda request: request.request_id, right=False),
        _Column("ago", lambda request: _ago(view.now_s - request.ended_at_s)),
        _Column("client", lambda request: request.client, from_width=130, right=False),
        _Column("tokens", _tokens, from_width=90),
        _Column("TTFT", lambda request: _seconds(request.ttft_s), from_width=80),
        _Column("total", lambda request: _seconds(request.total_s), from_width=70),
        _Column("path", _path, from_width=110, right=False),
        _Column("why", lambda request: "; ".join(request.slow), right=False, shrinks=True),
    )


def _kv(node: ShownNode) -> Text:
    if not node.blocks:
        return Text(_NOTHING)
    share = (node.blocks - node.blocks_free) / node.blocks
    return Text(f"{share:.0%}", "red" if share > 0.95 else "yellow" if share > 0.8 else "")


def _kept(node: ShownNode) -> str:
    """The sizes of what a node keeps outside of its cache."""
    return ", ".join(f"{store.name} {_bytes(store.bytes)}" for store in node.stores)


def _tokens(request: ShownRequest) -> str:
    prompt = _NOTHING if request.prompt_tokens is None else str(request.prompt_tokens)
    return f"{prompt}+{request.completion_tokens}"


def _path(request: ShownRequest) -> str:
    if request.outcome != "finished" or request.receipt is None:
        return request.outcome
    return request.receipt.path


# ---- links


def _rates(view: ClusterView, before: ClusterView | None) -> dict[tuple[str, str], float]:
    """Returns each link's bytes per second between the two views."""
    if before is None or view.now_s <= before.now_s:
        return {}
    known = {_key(before, link): link.bytes_total for link in before.links}
    passed_s = view.now_s - before.now_s
    found = {}
    for link in view.links:
        key = _key(view, link)
        if key in known:
            found[key] = max(0, link.bytes_total - known[key]) / passed_s  # a restarted node's count begins at 0
    return found


def _key(view: ClusterView, link: ShownLink) -> tuple[str, str]:
    node = _node(view, link.prefill)
    return ("" if node is None else node.address), link.peer


def _name(view: ClusterView, place: int | None, otherwise: str) -> str:
    node = _node(view, place)
    return otherwise if node is None else node.name


def _node(view: ClusterView, place: int | None) -> ShownNode | None:
    return view.nodes[place] if place is not None and 0 <= place < len(view.nodes) else None


# ---- texts


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _text(cell: str | Text, *, one_line: bool) -> Text:
    """Wraps a cell in `Text`. NOTE: rich would interpret markup in a plain string."""
    text = cell if isinstance(cell, Text) else Text(cell)
    if one_line:
        text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _percentiles(name: str, p50: Sequence[float | None], p99: Sequence[float | None]) -> Text:
    last = [values[-1] if values else None for values in (p50, p99)]
    return _line(
        (name, "bold"), f"  p50 {_seconds(last[0]):>8}  p99 {_seconds(last[1]):>8}  ", (_sparks(p99[-_SPARKS:]), "cyan")
    )


def _sparks(values: Sequence[float | None]) -> str:
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return ""
    top = len(_HEIGHTS) - 1
    return "".join(" " if value is None else _HEIGHTS[round(max(0.0, value) / most * top)] for value in values)


def _color(state: str) -> str:
    return _COLORS.get(state, "red")


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value else "0"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _megabytes(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e6:.1f}"


def _ago(passed_s: float) -> str:
    passed_s = max(0.0, passed_s)
    if passed_s < 60:
        return f"{passed_s:.0f} s"
    return f"{passed_s / 60:.0f} min" if passed_s < 3600 else f"{passed_s / 3600:.0f} h"


def _clock(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(min(max(unix_s, 0.0), _LATEST_S), UTC):%H:%M:%S} UTC"
