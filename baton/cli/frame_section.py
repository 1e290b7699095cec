"""A section of a frame: a table that is fitted to a number of lines and to the terminal's width. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.frame_texts import cell_text, text_line

Row = TypeVar("Row")

_REASON_WIDTH = 24  # least width of reasons, which continue on further lines


@dataclass(frozen=True)
class Column(Generic[Row]):
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
class Section(Generic[Row]):
    """A table. `first` has its rows in order of importance, for when not all of them fit."""

    name: str
    columns: Sequence[Column[Row]]
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
            yield text_line((self.empty, "dim"))
            return
        left_out = len(self.rows) - (lines - 2)
        if left_out <= 0:
            yield self._table(self.rows)
            return
        shown = self.first[: lines - 3]
        if shown:
            yield self._table(shown)
        more = len(self.rows) - len(shown)
        yield text_line((f"{more} more {self.name}" if shown else f"{more} {self.name}", "dim"))

    def _table(self, rows: Sequence[Row]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        shown = [column for column in self.columns if self.width >= column.from_width]
        cells = [[cell_text(column.cell(row), one_line=not self.whole) for row in rows] for column in shown]
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


def _least_width(column: Column[Any], texts: Sequence[Text]) -> int:
    """The least width of a column in a frame that shows everything."""
    longest = max(each.cell_len for each in (Text(column.title), *texts))
    return min(longest, _REASON_WIDTH) if column.shrinks else longest
