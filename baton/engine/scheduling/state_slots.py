"""Assigns the slots of recurrent states to requests and to snapshots of prefixes. Pure.

A request has a slot of its own from its admission to its end. Slots that no request needs hold snapshots: states after
the full blocks of a prefix, by the key of its last block. A request that begins with such a prefix copies the snapshot
to its own slot before its first step. Requests take slots from snapshots, the least recently used first; a snapshot
that a queued step still reads or writes keeps its slot.
"""

from collections import Counter, OrderedDict

from baton.core.block_keys import BlockKey

NO_SLOT = -1


class StateSlots:
    """Slots 0 to `num_slots - 1`.

    Attributes:
        num_held: slots of requests.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_held = 0
        self._free = list(reversed(range(num_slots)))
        # Key, slot and root of each, the least recently used first.
        self._snapshots: OrderedDict[bytes, tuple[BlockKey, int, bytes]] = OrderedDict()
        self._pins: Counter[int] = Counter()  # copies from a snapshot that have not ended, by slot
        self._forgotten: set[int] = set()  # pinned slots whose snapshot was dropped

    @property
    def num_available(self) -> int:
        """Slots that a request could take now."""
        return len(self._free) + len(self._snapshots) - (len(self._pins) - len(self._forgotten))

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def has(self, key: BlockKey) -> bool:
        """Whether there is a snapshot after this block."""
        known = self._snapshots.get(key.digest)
        return known is not None and known[0] == key

    def take(self, source: BlockKey | None = None) -> tuple[int, int]:
        """Takes a slot for a request, and finds the snapshot from which it continues (NO_SLOT without `source`). The
        snapshot is pinned until `unpin`; but if its slot is the last available one, the request takes that slot itself.
        """
        assert self.num_available, "the caller checks num_available first"
        self.num_held += 1
        if source is None:
            return self._vacate(), NO_SLOT
        snapshot = self._snapshots[source.digest][1]
        if self.num_available == 1 and snapshot not in self._pins:
            del self._snapshots[source.digest]
            return snapshot, snapshot
        self._snapshots.move_to_end(source.digest)
        self._pins[snapshot] += 1
        return self._vacate(), snapshot

    def pin(self, key: BlockKey) -> int:
        """Keeps the snapshot after this block until `unpin`, because it is being read. Returns its slot; NO_SLOT if
        there is no snapshot, or if no other slot would be available."""
        if not self.has(key):
            return NO_SLOT
        snapshot = self._snapshots[key.digest][1]
        if snapshot not in self._pins and self.num_available < 2:
            return NO_SLOT
        self._pins[snapshot] += 1
        return snapshot

    def unpin(self, snapshot: int) -> None:
        """Ends one pin of a snapshot: the copy has ended, or is not needed."""
        self._pins[snapshot] -= 1
        if self._pins[snapshot]:
            return
        del self._pins[snapshot]
        if snapshot in self._forgotten:
            self._forgotten.remove(snapshot)
            self._free.append(snapshot)

    def give_back(self, slot: int) -> None:
        """Frees the slot of an ended request, which no step in flight uses."""
        self.num_held -= 1
        self._free.append(slot)

    # ---- drafts

    def lend(self, count: int) -> tuple[int, ...]:
        """Takes slots that the next step writes. Neither requests nor snapshots have them until `take_back`, or until
        the caller gives one to a request in exchange for the request's own, or to `end_snapshot`."""
        return tuple(self._vacate() for _ in range(count))

    def take_back(self, slot: int) -> None:
        """Frees a slot that was lent."""
        self._free.append(slot)

    # ---- snapshots

    def begin_snapshot(self, key: BlockKey, *, spare: int = 0) -> int:
        """Takes a slot for the state after this block, which a step will write. Returns NO_SLOT if there is a snapshot
        already, or if fewer than `spare` slots would stay available. Neither a request nor a snapshot has the slot
        until `end_snapshot`."""
        if self.has(key):
            self._snapshots.move_to_end(key.digest)
            return NO_SLOT
        return self._vacate() if self.num_available > spare else NO_SLOT

    def end_snapshot(self, key: BlockKey, slot: int, *, written: bool, root: bytes = b"") -> None:
        """Offers the snapshot to later requests when its step has ended, if it was written.

        Args:
            root: the parent of its sequence's first block, for `forget_roots`.
        """
        if not written or key.digest in self._snapshots:
            self._free.append(slot)
        else:
            self._snapshots[key.digest] = key, slot, root

    def demote(self, key: BlockKey) -> None:
        """Makes this snapshot the first to be evicted."""
        if self.has(key):
            self._snapshots.move_to_end(key.digest, last=False)

    def forget(self, key: BlockKey) -> None:
        """Drops the snapshot after this block, if there is one."""
        known = self._snapshots.get(key.digest)
        if known is None:
            return
        slot = known[1]
        del self._snapshots[key.digest]
        if slot in self._pins:
            self._forgotten.add(slot)
        else:
            self._free.append(slot)

    def forget_roots(self, roots: frozenset[bytes]) -> None:
        """Drops the snapshots of all sequences with one of these roots."""
        for key in [key for key, _, root in self._snapshots.values() if root in roots]:
            self.forget(key)

    def _vacate(self) -> int:
        if self._free:
            return self._free.pop()
        digest, (_, slot, _) = next(item for item in self._snapshots.items() if item[1][1] not in self._pins)
        del self._snapshots[digest]
        return slot
