"""Finds stop strings in text that comes in pieces. Pure.

Of several stop strings the first complete one wins; of several that end at the same character, the longest. So the
result does not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Passed:
    """Text that may be shown, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None = None


class StopStrings:
    """Passes text on, and holds back only what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._longest = max(map(len, self._beginnings), default=0)

    def would_stop(self, text: str, *, searched: int = 0) -> bool:
        """Whether this text would complete a stop string if it came next; `searched` as in `push`."""
        return self._find(self._held + text, len(self._held) + searched) is not None

    def push(self, text: str, *, may_stop: bool = True, searched: int = 0) -> Passed:
        """Takes the text of some more tokens.

        Args:
            may_stop: whether a stop string that this text completes counts; one that it only begins may count later.
            searched: characters of the text at its beginning that complete no stop string that counts.
        """
        new_from = len(self._held) + searched
        text = self._held + text
        found = self._find(text, new_from) if may_stop else None
        if found is None:
            shown = len(text) - self._unsure(text)
            self._held = text[shown:]
            return Passed(text[:shown])
        self._held = ""
        start, stop = found
        return Passed(text[: start + len(stop)] if self._include_stop else text[:start], stop)

    def finish(self) -> str:
        """Returns the text that was held back: no stop string can follow any more."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, new_from: int) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first; none is complete before `new_from`."""
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = text.find(stop, max(0, new_from + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _unsure(self, text: str) -> int:
        """Length of the longest suffix of the text that begins a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
