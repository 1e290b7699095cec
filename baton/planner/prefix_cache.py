"""A node's prefix cache in the simulation: the ids of prompts' pieces, the least recently used dropped first. Pure.

An id names a piece of a prompt together with all pieces before it, so a prompt has the leading ids that are present.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class SimulatedChanges(NamedTuple):
    """Ids that came into a cache, that left it, and of the latter those that host memory still has."""

    stored: list[int]
    removed: list[int]
    outside: Sequence[int] = ()


class SimulatedPrefixCache:
    """A prefix cache of ids in place of tokens, which drops the ids that were used longest ago.

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
        """How many leading ids are present."""
        ids = self._ids
        for place, prefix_id in enumerate(prefix_ids):
            if prefix_id not in ids:
                return place
        return len(prefix_ids)

    def use(self, prefix_ids: Sequence[int]) -> SimulatedChanges:
        """Stores the whole prompt, and drops what was used least recently. The ends of prompts go first."""
        ids = self._ids
        kept = prefix_ids[: self._capacity]
        stored = [prefix_id for prefix_id in kept if prefix_id not in ids]
        for prefix_id in reversed(kept):
            ids[prefix_id] = None
            ids.move_to_end(prefix_id)
        return SimulatedChanges(stored, [ids.popitem(last=False)[0] for _ in range(len(ids) - self._capacity)])
