"""Finds the rows of a decode step whose shared first blocks are worth reading once, from step to step. Pure.

Rows come and go rarely. Unchanged rows are compared by identity only.
"""

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import NamedTuple, Protocol

from baton.engine.batch import BatchRow
from baton.engine.device.prefix_tree import PrefixTree, SharedBlocks
from baton.engine.request import IntArray

# Fewer rows save little: other kernels are launched for each layer.
LEAST_ROWS = 8


class RowGroup(NamedTuple):
    """Rows of a step that share their first `num_keys` keys, in whole blocks. Their places are in order."""

    places: tuple[int, ...]
    num_keys: int


class Saving(Protocol):
    """The time that a group saves, see `attention.prefix_group.GroupSavings`."""

    def __call__(self, *, num_rows: int, span: int, num_keys: int) -> float: ...


class SharedPrefix:
    """The group of the current step.

    Args:
        saving: above 0: the group is worth it.
    """

    def __init__(self, saving: Saving, *, block_size: int) -> None:
        self._saving = saving
        self._block_size = block_size
        self._tree = PrefixTree()
        self._rows: list[BatchRow] = []
        # The blocks of each request when its row was last looked at.
        self._blocks: dict[str, IntArray] = {}
        self._group: RowGroup | None = None

    def find(self, rows: Sequence[BatchRow]) -> RowGroup | None:
        """Returns the group of the step that saves most; the same object as before if it has not changed. Rows of one
        request have the same blocks."""
        if len(rows) < LEAST_ROWS:
            return None
        before, known = self._rows, self._blocks
        places = list(compress(count(), map(is_not, rows, before)))
        if not places and len(rows) == len(before):
            return self._group
        changed = [rows[place] for place in places] + list(rows[len(before) :])
        names_before = [before[place].request_id for place in places] + [row.request_id for row in before[len(rows) :]]
        names = [row.request_id for row in changed]
        moved = names != names_before
        for row in changed:
            # A request whose blocks change has a new array.
            if known.get(row.request_id) is not row.block_ids:
                moved |= self._update(row)
        for request_id in {*names_before}.difference(names):
            if known.pop(request_id, None) is not None:
                self._tree.remove(request_id)
        self._rows = list(rows)
        if moved:
            self._choose()
        return self._group

    def _update(self, row: BatchRow) -> bool:
        """Adds a row, or replaces one whose blocks have changed. A row's new blocks are its own, so they do not count.
        Returns whether the tree has changed."""
        name, blocks = row.request_id, row.block_ids
        self._blocks[name] = blocks
        known = self._tree.blocks_of(name)
        if known is not None:
            if blocks[: len(known)] == known and len(known) <= row.token_start // self._block_size:
                return False
            self._tree.remove(name)
        # A query lies after all of the keys that it shares.
        self._tree.add(name, blocks[: row.token_start // self._block_size])
        return True

    def _choose(self) -> None:
        # By the number of rows; only the best one's places are looked for.
        best: SharedBlocks | None = None
        most = 0.0
        for shared in self._tree.shared(LEAST_ROWS):
            num_rows = len(shared.requests)
            saved = self._saving(num_rows=num_rows, span=num_rows, num_keys=shared.num_blocks * self._block_size)
            if saved > most:
                best, most = shared, saved
        group = None
        if best is not None:
            requests = best.requests
            places = tuple([place for place, row in enumerate(self._rows) if row.request_id in requests])
            num_keys = best.num_blocks * self._block_size
            if self._saving(num_rows=len(places), span=places[-1] + 1 - places[0], num_keys=num_keys) > 0:
                group = RowGroup(places, num_keys)
        if group != self._group:
            self._group = group
