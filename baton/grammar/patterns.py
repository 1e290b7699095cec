"""Translates regular expressions of JSON Schema, which are ECMAScript's, to the grammar library's syntax, which is
Rust's.

Both agree on most expressions. Where they do not, the expression is rewritten to what ECMAScript means, or refused.
"""

import re
from collections.abc import Iterator

# What ECMAScript's `\s` and `.` mean; Rust's `\s` also matches U+0085, and its `.` matches all but U+000A.
_SPACES = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_REWRITTEN = {".": r"[^\n\r\u2028\u2029]", r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]", r"\/": "/", r"\-": r"\-"}
_ESCAPED_LETTERS = frozenset("dDwWtnrvfxusSpP")
_ESCAPED_MARKS = frozenset("^$\\.*+?()[]{}|/-")
_CLASS_OPERATORS = ("&&", "--", "~~")
# A class, an escape, a repetition with its numbers, or one character. Without its bound, many `[` take minutes.
_REPEATED = re.compile(
    r"\\.|\{\s{0,9}(\d{1,20}\s{0,9},?\s{0,9}\d{0,20})\s{0,9}\}|\[(?:\\.|[^\]\\]){0,100}\]|.", re.DOTALL
)
_NUMBER = re.compile(r"\d+")
_MOST_PARTS = 100_000
_ASSERTIONS = ("(?=", "(?!", "(?<=", "(?<!")


class UnsupportedPattern(ValueError):
    """An expression is not supported; the message is part of a sentence."""


def to_rust(pattern: str) -> str:
    """The same expression for the grammar library.

    Raises:
        UnsupportedPattern: it has look-around, back-references, or a construct that means something else in Rust.
    """
    check_repetitions(pattern)
    pieces: list[str] = []
    in_class = False
    for place, piece in _pieces(pattern):
        if len(piece) == 2 and piece[1] not in _ESCAPED_LETTERS | _ESCAPED_MARKS:
            raise UnsupportedPattern(f"it has the escape {piece}")
        if in_class:
            if piece == "[" or pattern.startswith(_CLASS_OPERATORS, place):
                raise UnsupportedPattern(f"it has {pattern[place : place + 2]!r} in a character class")
            in_class = piece != "]"
        elif piece == "[":
            in_class = True
            if pattern.startswith(("[]", "[^]"), place):
                raise UnsupportedPattern("it has an empty character class")
        elif pattern.startswith(_ASSERTIONS, place):
            raise UnsupportedPattern("it looks ahead or behind")
        elif pattern.startswith("(?", place) and not pattern.startswith(("(?:", "(?<", "(?P<"), place):
            raise UnsupportedPattern(f"it has the group {pattern[place : place + 3]!r}")
        pieces.append(piece if in_class and piece in ".[" else _REWRITTEN.get(piece, piece))
    return "".join(pieces)


def without_anchors(pattern: str) -> str:
    """The pattern without anchors at its ends: the whole output matches anyway, and the grammar library knows no
    anchors."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and backslashes % 2 == 0 else pattern


def check_repetitions(text: str) -> None:
    """Bounds the size to which repetitions such as {1000} expand a regular expression, or a grammar of them. The
    grammar library does not: masks of an expression of a million parts take a second.

    Raises:
        UnsupportedPattern: it has too many parts.
    """
    sizes, last = [0], 0
    for piece in _REPEATED.finditer(text):
        if piece[1]:
            most = max(map(int, _NUMBER.findall(piece[1])))
            sizes[-1] += last * max(0, most - 1)
            last *= most
        elif piece[0] == "(":
            sizes.append(0)
        elif piece[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += 1
        if sizes[-1] > _MOST_PARTS:
            raise UnsupportedPattern(f"its repetitions make it longer than {_MOST_PARTS} parts")


def _pieces(pattern: str) -> Iterator[tuple[int, str]]:
    """Characters, and escapes of two characters, with their places."""
    place = 0
    while place < len(pattern):
        length = 2 if pattern[place] == "\\" else 1
        piece = pattern[place : place + length]
        if piece == "\\":
            raise UnsupportedPattern("it ends with a backslash")
        yield place, piece
        place += length
