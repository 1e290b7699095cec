"""The earliest of many deadlines. Pure."""

import heapq

# Below this size, rebuilding the heap to drop outdated entries is not worth its cost.
_HEAP_MIN = 64


class Deadlines:
    """At most one deadline for each engine id. Setting one costs O(log n), reading the first one nothing."""

    def __init__(self) -> None:
        self._by_id: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # entries that differ from `_by_id` are outdated

    def set(self, engine_id: str, deadline_s: float | None) -> None:
        """Replaces the deadline of one request; None removes it."""
        if self._by_id.get(engine_id) == deadline_s:
            return
        if deadline_s is None:
            del self._by_id[engine_id]
        else:
            self._by_id[engine_id] = deadline_s
            heapq.heappush(self._heap, (deadline_s, engine_id))
        if len(self._heap) > max(_HEAP_MIN, 2 * len(self._by_id)):
            self._heap = [(deadline_s, engine_id) for engine_id, deadline_s in self._by_id.items()]
            heapq.heapify(self._heap)
        while self._heap and self._by_id.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)

    @property
    def first_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[str]:
        """The requests whose deadline has come, earliest first. Their deadlines stay until they are set anew."""
        if self.first_s is None or self.first_s > now_s:
            return []
        return sorted((name for name, at_s in self._by_id.items() if at_s <= now_s), key=self._by_id.__getitem__)
