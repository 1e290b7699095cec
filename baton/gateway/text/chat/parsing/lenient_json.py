"""Converts JSON that models broke to valid JSON: whole values, and the arguments that a conversation sends back."""

import json
import math
from typing import Any

from baton.gateway.text.chat.parsing.cursor import SPACE
from baton.gateway.text.chat.parsing.json_rewriter import CLOSES, JsonRewriter, quoted, scalar_so_far, well_formed

MENDED_CHARS_MAX = 256 << 10  # of one conversation: rewriting takes about 4 s a million structural characters


def json_so_far(text: str) -> str:
    """Returns the beginning of the JSON to which a text without its end will be converted."""
    if not text.startswith(tuple(CLOSES)):
        return scalar_so_far(text) if text else ""
    rewriter = JsonRewriter()
    rewriter.read(text, 0)
    return rewriter.take() + rewriter.held()


def rewritten(text: str) -> str:
    """Returns the object or array at the beginning of the text as valid JSON."""
    rewriter = JsonRewriter()
    rewriter.read(text, 0, last=True)
    rewriter.complete()
    return rewriter.take()


class ArgumentReader:
    """Reads the arguments of a conversation's calls as objects. Broken JSON is repaired up to a total length."""

    def __init__(self) -> None:
        self._chars_left = MENDED_CHARS_MAX

    def read(self, text: str) -> dict[str, Any]:
        """Returns the arguments of one call. Text that contains no object becomes the member `arguments`."""
        text = well_formed(text)
        stripped = text.strip()
        if not stripped or stripped == "null":
            return {}
        try:
            found = self._object(stripped)
        except (ValueError, RecursionError):
            found = None
        return {"arguments": text} if found is None else found

    def _object(self, text: str) -> dict[str, Any] | None:
        if text.startswith('"'):  # JSON in a string
            inner = json.loads(text, strict=False)
            text = well_formed(inner).lstrip() if isinstance(inner, str) else ""
        if not text.startswith("{"):
            return None
        try:
            return dict(strict_json(text))
        except ValueError:
            self._chars_left -= len(text)
            return dict(json.loads(rewritten(text))) if self._chars_left >= 0 else None


def strict_json(text: str) -> Any:
    """Returns the value of JSON by RFC 8259.

    Raises:
        ValueError: the text is not JSON, or has infinite numbers or halves of surrogate pairs.
        RecursionError: the text is nested too deeply.
    """
    value = json.loads(text, parse_constant=_refused, parse_float=_finite)
    if r"\ud" in text or r"\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


class ArgumentJson:
    """Converts the text of one call's arguments to valid JSON: an object as it comes, anything else at its end."""

    def __init__(self) -> None:
        self._rewriter = JsonRewriter()
        self._rest = ""  # what the rewriter left to be read with more text
        self._other: list[str] = []  # text that is not an object
        self._begun = False

    def push(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip(SPACE)
            if not text:
                return ""
            self._begun = True
            self._other = [] if text.startswith("{") else [""]
        if self._other:
            self._other.append(text)
            return ""
        text = self._rest + text
        self._rest = text[self._rewriter.read(text, 0) :]
        return self._rewriter.take()

    def finish(self, *, cut: bool) -> str:
        """Returns the rest. `cut`: the text may not be whole, so the JSON stays open."""
        other = "".join(self._other)
        if cut:
            return other or self._rewriter.held()
        if not self._begun:
            return "{}"
        if self._other:
            try:
                strict_json(other)
            except (ValueError, RecursionError):
                return quoted(other)
            return other
        self._rewriter.read(self._rest, 0, last=True)
        self._rewriter.complete()
        return self._rewriter.take()
