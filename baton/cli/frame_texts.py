"""Writes a frame's lines, cells and amounts. Pure."""

from rich.text import Text

NOTHING = "-"
_COLORS = {"ready": "green", "serving": "green", "draining": "yellow", "connecting": "yellow"}  # others: red


def text_line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def cell_text(cell: str | Text, *, one_line: bool) -> Text:
    """Wraps a cell in `Text`. NOTE: rich would interpret markup in a plain string."""
    text = cell if isinstance(cell, Text) else Text(cell)
    if one_line:
        text.no_wrap, text.overflow = True, "ellipsis"
    return text


def state_color(state: str) -> str:
    return _COLORS.get(state, "red")


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value else "0"


def size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
