"""Reads the turns of a conversation: lines of a pipe, or what a person types or pastes in a terminal."""

import select
import sys
from importlib import import_module
from typing import Protocol

_PASTE_S = 0.05  # a pasted line follows the one before it at once, a typed one does not
_QUOTES = '"""'
PROMPT, _MORE = "you> ", "...> "


class Turns(Protocol):
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
