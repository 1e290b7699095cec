"""One benchmark figure as a row; rows as a table on the terminal, as Markdown and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.core.regular_file import write_regular_file

_HEADS = ("what", "work", "measured", "rival", "share", "goal")


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name, work: what was measured, and with which work.
        rival: name of the rival measured in the same run; empty if there is none.
        rival_measured: the rival's figure, in the same unit.
        goal: the wanted share of the rival; None: the row only informs.
        limit: an upper bound for our figure, for goals without a rival.
        less_is_better: for times; the share is then the rival's figure over ours.
    """

    name: str
    work: str
    measured: float
    unit: str
    rival: str = ""
    rival_measured: float | None = None
    goal: float | None = None
    limit: float | None = None
    less_is_better: bool = False

    @property
    def share(self) -> float | None:
        """Our share of the rival's figure; None without a rival."""
        if self.rival_measured is None:
            return None
        better, worse = (
            (self.rival_measured, self.measured) if self.less_is_better else (self.measured, self.rival_measured)
        )
        return better / worse

    @property
    def reached(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.limit is not None:
            return self.measured < self.limit
        if self.goal is None or self.share is None:
            return None
        return self.share >= self.goal

    def cells(self) -> tuple[str, ...]:
        rival = "" if self.rival_measured is None else f"{self.rival} {self.rival_measured:.3g} {self.unit}"
        share = "" if self.share is None else f"{self.share:.0%}"
        goal = "" if self.goal is None else f"{self.goal:.0%}"
        if self.limit is not None:
            goal = f"under {self.limit:g} {self.unit}"
        return self.name, self.work, f"{self.measured:.3g} {self.unit}", rival, share, goal


def print_rows(title: str, rows: Sequence[Row], console: Console | None = None) -> None:
    table = Table(*_HEADS, title=title)
    for row in rows:
        style = {True: "green", False: "red", None: ""}[row.reached]
        table.add_row(*row.cells(), style=style)
    (console or Console()).print(table)


def write_markdown(title: str, rows: Sequence[Row], path: Path) -> None:
    """Writes the rows as a Markdown table; makes the directory."""
    lines = [f"# {title}", "", _line(_HEADS), _line(["---"] * len(_HEADS))]
    lines += [_line(row.cells()) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_regular_file(path, "\n".join(lines) + "\n")


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Writes a file for `read_json`; makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_regular_file(path, "[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n")


def read_json(path: Path) -> list[Row]:
    return [Row(**fields) for fields in json.loads(path.read_text())]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
