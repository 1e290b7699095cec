"""A text that grows at its end while a generator reads it."""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where more text is needed
SPACE = " \t\r\n"


class Cursor:
    """The text that has come and was not consumed yet, and whether more will come.

    `position` may be set back to any place that was reached since the last `forget`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False

    def forget(self) -> None:
        """Drops what was read. Positions taken before are void."""
        self.text = self.text[self.position :]
        self.position = 0

    def have(self, count: int) -> Reading[bool]:
        """Whether `count` more characters come."""
        while len(self.text) < self.position + count:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, unread; empty at the end."""
        if not (yield from self.have(1)):
            return ""
        return self.text[self.position]

    def skip_space(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in SPACE:
            self.position += 1

    def accept(self, literal: str) -> Reading[bool]:
        """Reads `literal` if it comes next. A difference is seen as early as possible."""
        for index, character in enumerate(literal):
            if not (yield from self.have(index + 1)) or self.text[self.position + index] != character:
                return False
        self.position += len(literal)
        return True

    def accept_one(self, literals: Sequence[str]) -> Reading[str]:
        """Reads the first of the literals that comes next; empty: none does."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        return ""

    def match(self, characters: re.Pattern[str]) -> Reading[str]:
        """Reads all next characters of a class."""
        start = self.position
        while (character := (yield from self.peek())) and characters.match(character):
            self.position += 1
        return self.text[start : self.position]

    def until(self, markers: "Markers", write: Callable[[str], None]) -> Reading[str]:
        """Passes the text up to the next marker on, as it comes, and reads the marker. Forgets what it read.

        Returns:
            The marker; empty at the text's end.
        """
        while True:
            found = markers.pattern.search(self.text, self.position)
            end = found.start() if found else markers.held(self.text, self.position)
            if end > self.position and (found or not self.ended):
                write(self.text[self.position : end])
            if found:
                self.position = found.end()
                self.forget()
                return found.group()
            if self.ended:
                write(self.text[self.position :])
                self.position = len(self.text)
                return ""
            self.position = end
            self.forget()
            yield


class Markers:
    """Some strings to look for together."""

    def __init__(self, *markers: str) -> None:
        longest_first = sorted(filter(None, markers), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {marker[:length] for marker in longest_first for length in range(1, len(marker))}
        self._held_max = max(map(len, self._beginnings), default=0)

    def held(self, text: str, start: int) -> int:
        """Where the longest end of `text` begins that may be the beginning of a marker."""
        for begin in range(max(start, len(text) - self._held_max), len(text)):
            if text[begin:] in self._beginnings:
                return begin
        return len(text)
