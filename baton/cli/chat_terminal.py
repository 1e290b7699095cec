"""The terminal of a conversation: shows answers, plain into a pipe and as Markdown on a screen, and reads turns,
as lines of a pipe or as a person types or pastes them."""

import re
import select
import sys
from importlib import import_module
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model must not move the cursor
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_PASTE_S = 0.05  # a pasted line follows the one before it at once, a typed one does not
_QUOTES = '"""'
PROMPT, _MORE = "you> ", "...> "


class Written(Protocol):
    """The place where the text of one answer appears while it arrives."""

    def add(self, text: str) -> None:
        """Appends a piece of the answer."""
        ...

    def end(self) -> None:
        """Shows the rest. The next output begins on a line of its own."""
        ...


class PlainAnswer:
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
    return RenderedText(console) if console.is_terminal and not console.is_dumb_terminal else PlainAnswer()


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


class TurnReader(Protocol):
    """Where turns come from."""

    def read(self) -> str | None:
        """Returns the next turn, without its last newline, or None at the end of input."""
        ...


class PipedTurns:
    """Each line is one turn."""

    def read(self) -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


class TypedTurns:
    """A line is one turn. So are all lines of a paste, and all lines between two lines with three quotes.

    Arrow keys edit the line and go through the session's earlier lines, which are kept in memory only.
    """

    def __init__(self) -> None:
        import_module("readline")  # `input` then edits lines and keeps a history

    def read(self) -> str | None:
        while True:
            try:
                return self._turn()
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()

    def _turn(self) -> str:
        lines = [input(PROMPT)]
        while _line_waits():
            lines.append(input())
        text = "\n".join(lines)
        if not text.startswith(_QUOTES):
            return text
        text = text.removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += f"\n{input(_MORE)}"
        return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _line_waits() -> bool:
    """Whether more input has arrived, which is the rest of a paste."""
    return bool(select.select([sys.stdin], [], [], _PASTE_S)[0])
