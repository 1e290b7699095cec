"""The files of a store that are there or being written, and which of them leaves next. Pure."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile

from baton.core.kv_entries import KeepTime
from kvtransfer.stores.eviction import GreedyDual, RefusedKeys
from kvtransfer.stores.file_format import EntryFileName

# Tokens attend to all before them: at about 30,000 tokens this takes an 8B model as long as everything else.
_ENTRIES_OF_DOUBLE_COST = 512
# Entries that have left and that nobody has asked for yet.
_LOST_MAX = 1 << 16


class FileWrite:
    """One attempt to write a file."""

    def __init__(self, name: EntryFileName) -> None:
        self.name = name


class FileIndex:
    """Names of files, by the digests of their entries.

    Args:
        capacity: files of the full store.
        clock: monotonic seconds, for `keep`.
    """

    def __init__(self, capacity: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept: dict[bytes, EntryFileName] = {}
        self._writes: dict[bytes, FileWrite] = {}
        self._order = GreedyDual(capacity, clock=clock)
        self._refused = RefusedKeys()
        self._lost = deque[bytes](maxlen=_LOST_MAX)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a file is there. Any thread may ask."""
        return digest in self._kept

    def __len__(self) -> int:
        """How many files are there or being written."""
        return len(self._order)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def add(self, name: EntryFileName) -> None:
        """Adds a file that was found. A file whose digest is known changes nothing."""
        if name.digest not in self._order:
            self._enter(name)
            self._kept[name.digest] = name

    def touch(self, name: EntryFileName) -> None:
        """Adds a file, or marks it as used."""
        self.add(name)
        self._order.touch(name.digest)

    def keep(self, names: Iterable[EntryFileName], keep: KeepTime) -> bytes | None:
        """Keeps the first files of a sequence as long as asked for, or lets them leave first (`GreedyDual`).

        Returns the digest of the last of them; None if there are none.

        Args:
            names: of the sequence from its beginning.
        """
        there = [name.digest for name in takewhile(lambda name: name.digest in self._kept, names)]
        if keep.seconds:
            there = there[: self._order.keep(there, keep)]
        else:
            self._order.end(there, keep.tenant)
        return there[-1] if there else None

    def sequence(self, digest: bytes) -> list[EntryFileName]:
        """The files from the beginning of a sequence to the one with that digest. Returns an empty list if one is
        missing."""
        names: dict[bytes, EntryFileName] = {}
        while digest in self._kept and digest not in names:  # names may say that a sequence is a circle
            name = names[digest] = self._kept[digest]
            if name.parent == name.root:
                return list(names.values())[::-1]
            digest = name.parent
        return []

    def begin(self, name: EntryFileName) -> FileWrite | None:
        """Begins to write a file. Returns None if its digest's file is being written."""
        if name.digest in self._writes:
            return None
        self.lose(name)  # somebody has removed the file, else nobody would write it
        write = self._writes[name.digest] = FileWrite(name)
        self._enter(name)
        # So the entries before it stay too.
        self._order.pin(name.digest)
        self._refused.discard(name.digest)
        return write

    def refuse(self, write: FileWrite) -> None:
        """Ends a write for which there is no room."""
        self.end(write, is_kept=False)
        self._refused.add(write.name.digest)

    def is_wanted(self, write: FileWrite) -> bool:
        """Whether its entry was not dropped since it began."""
        return self._writes.get(write.name.digest) is write

    def end(self, write: FileWrite, *, is_kept: bool) -> None:
        """Ends a write. `is_kept` says whether its file is there."""
        digest = write.name.digest
        if not self.is_wanted(write):
            return
        del self._writes[digest]
        if is_kept:
            self._kept[digest] = write.name
            self._order.unpin(digest)
        else:
            self._order.remove(digest)

    def lose(self, name: EntryFileName) -> None:
        """Forgets a file that is not there any more."""
        if self._kept.pop(name.digest, None) is not None:
            self._order.remove(name.digest)
            self._lost.append(name.digest)

    def drop(self, name: EntryFileName) -> None:
        """Forgets a file, also one that is being written."""
        self.lose(name)
        if self._writes.pop(name.digest, None) is not None:
            self._order.remove(name.digest)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """As `drop`, for all files with one of these roots."""
        names = (*self._kept.values(), *(write.name for write in self._writes.values()))
        for name in names:
            if name.root in roots:
                self.drop(name)

    def may_displace(self, write: FileWrite) -> bool:
        """Whether others may leave for this write: not if the entry before it was refused."""
        return write.name.parent not in self._refused

    def evict(self) -> EntryFileName | None:
        """Forgets the file that is to leave next, and returns it; None if none may leave."""
        digest = self._order.evict()
        if digest is None:
            return None
        self._lost.append(digest)
        return self._kept.pop(digest)

    def replace(self, before: "FileIndex") -> None:
        """Takes the place of an index whose files are all lost."""
        self._lost.extend((*before._lost, *before._kept))

    def take_lost(self) -> list[bytes]:
        """Digests of the files that have left since the last call. One thread may call it while others change the
        index."""
        return [self._lost.popleft() for _ in range(len(self._lost))]

    def latest(self, most: int) -> list[EntryFileName]:
        """Up to so many files, those that were added last, and of each sequence all before them; parents first."""
        chosen: dict[bytes, EntryFileName] = {}
        for digest in reversed(self._kept):
            more = [] if digest in chosen else [each for each in self.sequence(digest) if each.digest not in chosen]
            if len(chosen) + len(more) > most:
                break
            chosen |= {each.digest: each for each in more}
        return sorted(chosen.values(), key=lambda name: name.number)

    def _enter(self, name: EntryFileName) -> None:
        self._order.add(name.digest, 1 + name.number / _ENTRIES_OF_DOUBLE_COST, name.parent)
