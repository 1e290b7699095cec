"""Shows the answers of a conversation: plain text into a pipe, Markdown on a terminal."""

import re
import sys
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model must not move the cursor
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")


class Written(Protocol):
    """The place where the text of one answer appears while it arrives."""

    def add(self, text: str) -> None:
        """Appends a piece of the answer."""
        ...

    def end(self) -> None:
        """Shows the rest. The next output begins on a line of its own."""
        ...


class PlainText:
    """Writes the text to stdout as it is."""

    def __init__(self) -> None:
        self._begun = False

    def add(self, text: str) -> None:
        self._begun = True
        print(text, end="", flush=True)

    def end(self) -> None:
        if self._begun:
            print(flush=True)
            self._begun = False


class RenderedText:
    """Renders Markdown on a terminal, a block at a time; the text of the unfinished block is shown as it arrives."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._live: Live | None = None

    def add(self, text: str) -> None:
        self._rest += _CONTROL.sub("", text)
        done, self._rest = split_blocks(self._rest)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(self._tail(), refresh=not done)
        if done:
            self._live.console.print(Markdown(done), "", sep="\n", end="")

    def end(self) -> None:
        if self._live is None:
            return
        self._live.update(Text(""), refresh=True)
        self._live.stop()
        self._live = None
        if self._rest.strip():
            self._console.print(Markdown(self._rest))
        self._rest = ""

    def _tail(self) -> Text:
        """The last lines of the unfinished block: a display taller than the terminal cannot be removed again."""
        width, height = self._console.width, max(2, self._console.height - 2)
        lines = Text(self._rest.lstrip("\n")).wrap(self._console, width)
        return Text("\n").join(lines[-height:])


def written(console: Console) -> Written:
    """The way to show an answer on this stdout."""
    return RenderedText(console) if console.is_terminal and not console.is_dumb_terminal else PlainText()


def split_blocks(text: str) -> tuple[str, str]:
    """Cuts Markdown after its last blank line outside of fenced code. Returns both parts; the first may be empty."""
    fence, place, cut = "", 0, 0
    for line in text.splitlines(keepends=True):
        place += len(line)
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(mark[1][0]):
                fence = ""
        elif mark:
            fence = mark[1]
        elif not line.strip() and line.endswith("\n"):
            cut = place
    return (text[:cut], text[cut:]) if text[:cut].strip() else ("", text)


def stdout_console() -> Console:
    return Console(file=sys.stdout, highlight=False)
