"""Which request gets the next free blocks: first come, first served, each for as long as it may wait. Pure."""

from baton.errors import Overloaded

_RETRY_AFTER_S = 1.0


class BlockQueue:
    """The requests that wait for blocks, by engine id. Only the first one may reserve.

    Args:
        waiting_max: how many requests may wait.
    """

    def __init__(self, *, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._engine_ids: dict[str, None] = {}  # in order of arrival

    def enter(self, engine_id: str, *, queue_s: float) -> None:
        """Appends a request that may wait for `queue_s`; 0: it must be served at once.

        Raises:
            Overloaded: too many wait already, or others wait and this one may not.
        """
        waiting = len(self._engine_ids)
        if waiting >= self._waiting_max:
            raise Overloaded(f"{waiting} requests wait for room already", retry_after_s=_RETRY_AFTER_S)
        if waiting and queue_s <= 0:
            raise no_room(queue_s)
        self._engine_ids[engine_id] = None

    def leave(self, engine_id: str) -> bool:
        """Removes a request that was served or has ended. True: it was the first, so the next one may reserve."""
        was_first = self.first == engine_id
        self._engine_ids.pop(engine_id, None)
        return was_first

    @property
    def first(self) -> str | None:
        return next(iter(self._engine_ids), None)

    def __len__(self) -> int:
        return len(self._engine_ids)


def no_room(queue_s: float) -> Overloaded:
    """The error of a request that found no blocks within `queue_s`."""
    return Overloaded(f"no room within {queue_s:g} s", retry_after_s=_RETRY_AFTER_S)
