"""Keeps texts that change with every request out of the prompt's beginning, which prefix caches hold. Pure."""

import re
from collections.abc import Sequence

# Claude Code's first block, with a checksum of each request; it says nothing to the model.
_HEADER_LINES = re.compile(r"(?:x-anthropic-[a-z0-9-]+:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
_CLOCK = re.compile(
    r"(?:today'?s|(?:the )?current) (?:date and time|date|time)(?: is)?:? [^\n]{0,40}\d[^\n]{0,40}", re.IGNORECASE
)


def stable_first(texts: Sequence[str]) -> list[str]:
    """Returns the texts of a system prompt without `x-anthropic-` header lines at their beginning, and with those that
    only tell the date or the time at the end."""
    kept = [text for text in map(_without_headers, texts) if text]
    return sorted(kept, key=_is_clock)


def _is_clock(text: str) -> bool:
    return _CLOCK.fullmatch(text.strip()) is not None


def _without_headers(text: str) -> str:
    headers = _HEADER_LINES.match(text)
    return text if headers is None else text[headers.end() :]
