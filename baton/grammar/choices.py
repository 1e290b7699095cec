"""What a grammar leaves to choose where it allows few tokens. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

_SPACES = b" \t\r\n"


class Choices(NamedTuple):
    """What a grammar allows next.

    Args:
        key: equal for equal allowed tokens.
        forced: the longest allowed token, if all others are prefixes of it, so that it is how most tokenizers write
            what must follow; -1: none.
        spaced: the same, if white space does not count; -1: none, or there is no white space.
    """

    key: int
    forced: int = -1
    spaced: int = -1


def choices_of(allowed: Mapping[int, bytes]) -> Choices:
    """Finds what is forced among tokens with these bytes."""
    key = hash(tuple(allowed))
    forced = _longest_of_all(allowed.items())
    if forced >= 0:
        return Choices(key, forced)
    stripped = {token: text.strip(_SPACES) for token, text in allowed.items()}
    spaced = _longest_of_all((token, text) for token, text in stripped.items() if text)
    if spaced >= 0:
        spaced = max((each for each in stripped if stripped[each] == stripped[spaced]), key=lambda e: len(allowed[e]))
    return Choices(key, spaced=spaced)


def _longest_of_all(tokens: Iterable[tuple[int, bytes]]) -> int:
    """The longest token, if all others are prefixes of it; otherwise -1."""
    longest, longest_text = -1, b""
    for token, text in sorted(tokens, key=lambda item: len(item[1])):
        if not text.startswith(longest_text):
            return -1
        longest, longest_text = token, text
    return longest
