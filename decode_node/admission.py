"""Decides which request gets the next free blocks. Pure.

Requests are served by priority, then by the time their first token is due, then first come, first served. Each waits
for at most its `max_queue_s`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from baton.core.errors import Overloaded
from baton.engine.request import EngineRequest, QueuePlace

_RETRY_AFTER_S = 1.0


class BlockQueue:
    """The queue of requests that wait for blocks, by engine id. Only the first one may reserve.

    A request that needs many blocks holds up all requests after it, and new requests may go before waiting ones, until
    the `max_queue_s` of those is over.

    Args:
        waiting_max: maximum number of waiting requests.
    """

    def __init__(self, *, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._arrivals = 0
        self._places: dict[str, QueuePlace] = {}
        self._queue: list[tuple[QueuePlace, str]] = []  # sorted

    def enter(self, request: EngineRequest, *, max_queue_s: float, now_s: float) -> None:
        """Puts a request at its place in the queue, where it may wait for `max_queue_s`; with 0 it must not wait.

        Raises:
            Overloaded: too many wait already, or others go first and this one may not wait.
        """
        waiting = len(self._queue)
        if waiting >= self._waiting_max:
            raise Overloaded(f"{waiting} requests wait for room already", retry_after_s=_RETRY_AFTER_S)
        engine_id = request.request_id
        entry = QueuePlace.of(request, arrival=self._arrivals, now=now_s), engine_id
        if waiting and self._queue[0] < entry and max_queue_s <= 0:
            raise no_room(max_queue_s)
        self._arrivals += 1
        self._places[engine_id] = entry[0]
        insort(self._queue, entry)

    def leave(self, engine_id: str) -> bool:
        """Removes a request that was served or has ended. Returns whether it was first, so the next may reserve."""
        was_first = self.first == engine_id
        if (place := self._places.pop(engine_id, None)) is not None:
            del self._queue[bisect_left(self._queue, (place, engine_id))]
        return was_first

    @property
    def first(self) -> str | None:
        return self._queue[0][1] if self._queue else None

    def __iter__(self) -> Iterator[str]:
        return (engine_id for _, engine_id in self._queue)

    def __len__(self) -> int:
        return len(self._queue)


def no_room(max_queue_s: float) -> Overloaded:
    """The error of a request that got no blocks within `max_queue_s`."""
    return Overloaded(f"no room within {max_queue_s:g} s", retry_after_s=_RETRY_AFTER_S)
