"""A simulated node's prefix cache: an LRU cache with an id for each piece of a prompt. Pure.

An id names a piece of a prompt together with all pieces before it, so a prompt has the leading ids that are present.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class SimulatedChanges(NamedTuple):
    """Ids that were added to a cache, that were evicted, and the evicted ids that host memory still has."""

    stored: list[int]
    removed: list[int]
    outside: Sequence[int] = ()


class SimulatedPrefixCache:
    """An LRU prefix cache of ids instead of tokens.

    Args:
        capacity: ids that fit.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, prefix_id: int) -> bool:
        return prefix_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def count(self, prefix_ids: Sequence[int]) -> int:
        """Number of leading ids that are present."""
        ids = self._ids
        for place, prefix_id in enumerate(prefix_ids):
            if prefix_id not in ids:
                return place
        return len(prefix_ids)

    def use(self, prefix_ids: Sequence[int]) -> SimulatedChanges:
        """Stores the whole prompt, and evicts the least recently used ids. The ends of prompts are evicted first."""
        ids = self._ids
        kept = prefix_ids[: self._capacity]
        stored = [prefix_id for prefix_id in kept if prefix_id not in ids]
        for prefix_id in reversed(kept):
            ids[prefix_id] = None
            ids.move_to_end(prefix_id)
        return SimulatedChanges(stored, [ids.popitem(last=False)[0] for _ in range(len(ids) - self._capacity)])
