"""Holds a text that grows at its end while a generator reads it."""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where more text is needed
SPACE = " \t\r\n"
READ_AGAIN_CHARS_MAX = 32 << 10  # of one output: reading broken JSON takes up to 4 us a character


class Cursor:
    """Holds the text that arrived and was not dropped yet.

    `position` may be set back to any place that was reached since the last `forget`. Reading an output takes time in
    proportion to its length.

    Attributes:
        ended: no more text comes.
        cut: the output reached its limit before the model ended it.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.cut = False
        self._read_again_chars = 0
        self._plain = 0  # `until` ignores markers before this position

    def push(self, text: str) -> None:
        # NOTE: only a local name that holds the one reference grows in place; `self.text += text` would copy all of it.
        whole = self.text
        self.text = ""
        whole += text
        self.text = whole

    def forget(self) -> None:
        """Drops the text before `position`. Positions that were taken before are void."""
        self._drop(self.position)

    def _drop(self, end: int) -> None:
        if 2 * end < len(self.text):
            return  # the rest is copied once it is shorter than the dropped text
        self.text = self.text[end:]
        self.position -= end
        self._plain = max(0, self._plain - end)

    def back(self, position: int) -> None:
        """Sets the cursor back to read text again that turned out to be no call.

        Attempts that fail long after their beginnings may overlap. So once many characters were read again, the markers
        within a failed attempt are plain text.
        """
        if self._read_again_chars > READ_AGAIN_CHARS_MAX:
            self._plain = max(self._plain, self.position)
        self._read_again_chars += self.position - position
        self.position = position

    def have(self, count: int) -> Reading[bool]:
        """Waits for `count` more characters. Returns whether they come."""
        while len(self.text) < self.position + count:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it; empty at the end."""
        if not (yield from self.have(1)):
            return ""
        return self.text[self.position]

    def skip_space(self) -> Reading[None]:
        """Reads all white space that comes next."""
        while (character := (yield from self.peek())) and character in SPACE:
            self.position += 1

    def accept(self, literal: str) -> Reading[bool]:
        """Reads `literal` if it comes next. Returns as soon as a character differs."""
        for index, character in enumerate(literal):
            if not (yield from self.have(index + 1)) or self.text[self.position + index] != character:
                return False
        self.position += len(literal)
        return True

    def accept_one(self, literals: Sequence[str]) -> Reading[str]:
        """Reads and returns the first literal that comes next; empty: none does."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        return ""

    def match(self, characters: re.Pattern[str]) -> Reading[str]:
        """Reads and returns all next characters of a class."""
        start = self.position
        while (character := (yield from self.peek())) and characters.match(character):
            self.position += 1
        return self.text[start : self.position]

    def skip_until(self, markers: "Markers") -> Reading[None]:
        """Drops the text up to the next marker or the end. The marker stays to be read."""
        self.unread((yield from self.until(markers, lambda _: None)))

    def unread(self, marker: str) -> None:
        """Sets the cursor back to the beginning of the marker that `until` read last."""
        self.position -= len(marker)

    def until(self, markers: "Markers", write: Callable[[str], None]) -> Reading[str]:
        """Writes the text up to the next marker, as it comes, and reads the marker. Forgets the text before it.

        Returns:
            The marker; empty at the text's end.
        """
        while True:
            start = max(self.position, self._plain)
            found = markers.pattern.search(self.text, start)
            end = found.start() if found else markers.held(self.text, start)
            if found and markers.overlap and not self.ended and (held := markers.held(self.text, start)) <= end:
                found, end = None, held  # a longer marker, which begins no later, may still come
            if end > self.position and (found or not self.ended):
                write(self.text[self.position : end])
            if found:
                self.position = found.end()
                self._drop(found.start())
                return found.group()
            if self.ended:
                write(self.text[self.position :])
                self.position = len(self.text)
                return ""
            self.position = end
            self.forget()
            yield


class Markers:
    """Strings that a reader looks for together.

    Attributes:
        markers: the strings.
        firsts: their first characters.
        chars_max: length of the longest one.
        overlap: one of them contains another one.
    """

    def __init__(self, *markers: str) -> None:
        longest_first = sorted(filter(None, markers), key=len, reverse=True)
        self.markers = tuple(longest_first)
        self.firsts = frozenset(marker[0] for marker in longest_first)
        self.chars_max = len(longest_first[0]) if longest_first else 0
        self.overlap = any(one in other for one in longest_first for other in longest_first if one != other)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {marker[:length] for marker in longest_first for length in range(1, len(marker))}

    def held(self, text: str, start: int) -> int:
        """Returns where the longest suffix of `text` begins that may be the beginning of a marker."""
        for begin in range(max(start, len(text) - self.chars_max + 1), len(text)):
            if text[begin:] in self._beginnings:
                return begin
        return len(text)
