"""Which place in a step each decoding request has: the one that it had in the step before, wherever that can be. Pure.

A row that keeps its place has to be neither made nor copied to the device again.
"""

from engine.scheduling.state import RequestState


class Places:
    """The decodes of one step after the other."""

    def __init__(self) -> None:
        self._arrived: list[RequestState] = []
        self._placed: list[RequestState] = []

    def seat(self, decoding: list[RequestState]) -> list[RequestState]:
        """The same requests in the order of their places. Newcomers take what places are free, and the last requests
        those that are free then."""
        if decoding != self._arrived:
            self._arrived = decoding
            self._placed = _moved(self._placed, decoding)
        return self._placed


def _moved(before: list[RequestState], decoding: list[RequestState]) -> list[RequestState]:
    stay, known = set(decoding), set(before)
    newcomers = [state for state in decoding if state not in known]
    places = [state if state in stay else None for state in before[: len(decoding)]]
    moved = [state for state in before[len(decoding) :] if state in stay]
    filling = iter([*newcomers, *moved])
    return [next(filling) if state is None else state for state in places] + list(filling)
