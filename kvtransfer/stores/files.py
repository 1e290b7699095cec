"""A store in files: one file for each entry, in a directory that survives its processes. Any thread may call it.

The names of the files are the index; `kvtransfer.stores.file_names` finds them. A file is used only if its size and
header are exactly what they must be, but the entry in it is not checked here: whoever reads it checks its digest.
Several processes may share a directory: each one counts all files that it finds, and a file that another one removed is
a miss.
"""

import errno
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock

from baton.core.kv_entries import EntryKey, KeepTime
from kvtransfer.stores.entry_files import EntryFiles
from kvtransfer.stores.file_format import TEMPORARY, EntryFileName
from kvtransfer.stores.file_index import FileIndex, FileWrite
from kvtransfer.stores.file_names import FolderNames, files_of_roots, keys_of, remove_abandoned
from kvtransfer.stores.file_reads import FileReads, Joinable
from kvtransfer.stores.keep_log import KeepLog, KeepRecord
from kvtransfer.stores.leftovers import Leftovers, open_locked
from kvtransfer.stores.store import StoreCounters

_log = logging.getLogger("baton")

# How long opening may look for files. Writes find the others, a few each.
_OPEN_S = 1.0
# A round through all names ends before the store has written a part in so many of its files. That bounds how far
# processes that share a directory exceed its size.
_NAMES_A_WRITE = 32
# More than a write adds, so that a store that was made smaller shrinks.
_REMOVED_A_WRITE = 8
# A disk that fails does so many times a second.
_WARN_EVERY_S = 60.0


class FileStore:
    """Keeps entries in the files of a directory.

    Opening it never fails: calls count as failed while the directory cannot be used.

    Args:
        directory: may be shared by all ranks and nodes of a host.
        namespace: a digest of all that must be equal for an entry to be of use: spec, dtype, heads, entry size.
        max_bytes: of the files of this namespace and of namespaces that no process has open.
        joined: files of other numbers of ranks, which are read where its own are missing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        namespace: bytes,
        entry_bytes: int,
        max_bytes: int,
        joined: Sequence[Joinable] = (),
        name: str = "file",
    ) -> None:
        self.name = name
        self._directory = directory
        self._files = EntryFiles.within(directory, namespace, entry_bytes)
        self._reads = FileReads(self._files, joined, self._count)
        self._keep_log = KeepLog(self._files.folder)
        self._max_bytes = max_bytes
        self._lock = Lock()  # of what follows, but for the names
        self._ended = Condition(self._lock)
        self._index = self._new_index()
        self._leftovers: Leftovers | None = None
        self._totals = Counter[str]()
        self._calls = 0
        self._is_closed = False
        self._warned_s = -math.inf
        self._folder_fd = -1
        self._names_lock = Lock()
        self._names = FolderNames(self._files.folder)
        self._open_folder()
        self._find_first_names()
        self._recall_keeps()

    def has(self, keys: Sequence[EntryKey]) -> int:
        # The index does not know what other processes add and remove.
        for number, key in enumerate(keys):
            if not self._reads.has_own(key):
                with self._lock:
                    self._index.lose(EntryFileName.of(key))
                if not self._reads.can_join(key):
                    return number
        return len(keys)

    def first(self, keys: Sequence[EntryKey]) -> int:
        for number, key in enumerate(keys):
            if self._reads.has_own(key) or self._reads.can_join(key):
                return number
        return len(keys)

    def get(self, key: EntryKey, into: memoryview) -> bool:
        assert into.nbytes == self._files.entry_bytes
        with self._call() as is_open:
            return is_open and self._read(key, into)

    def put(self, key: EntryKey, entry: memoryview) -> bool:
        assert entry.nbytes == self._files.entry_bytes
        with self._call() as is_open:
            if not is_open:
                return False
            name = EntryFileName.of(key)
            if self._reads.has_own(key):
                with self._lock:
                    self._index.touch(name)
                return True
            return self._write(name, key, entry)

    def keep(self, keys: Sequence[EntryKey], keep: KeepTime) -> None:
        with self._lock:
            last = self._index.keep(map(EntryFileName.of, keys), keep)
        if last is None:
            return
        try:
            self._keep_log.append(KeepRecord(time.time(), keep.seconds, keep.tenant, last))
        except OSError:
            self._count("failed")

    def drop(self, keys: Sequence[EntryKey]) -> None:
        for key in keys:
            name = EntryFileName.of(key)
            with self._lock:
                self._index.drop(name)
            self._reads.remove(key)

    def drop_roots(self, roots: frozenset[bytes]) -> int | None:
        with self._lock:
            self._index.drop_roots(roots)
            failed = self._totals["failed"]
        self._reads.forget_roots(roots)
        try:
            # All names, also of files that other processes have written, and of namespaces that nobody opens any more.
            dropped = sum(map(self._reads.unlink, files_of_roots(self._directory, roots)))
        except OSError:
            self._count("failed")
            return None
        return dropped if self.counters().failed == failed else None

    def knows(self, digest: bytes) -> bool:
        return digest in self._index

    def take_lost(self) -> Sequence[bytes]:
        # An entry that was joined may have a file of its own by now.
        joined = [digest for digest in self._reads.take_lost() if not self.knows(digest)]
        return [*self._index.take_lost(), *joined]

    def found(self, most: int) -> Sequence[EntryKey]:
        with self._lock:
            names = self._index.latest(most)
        keys = keys_of(self._files.folder, names, self._files.namespace, self._files.entry_bytes)
        return keys + self._reads.found_joined(most - len(keys))

    def counters(self) -> StoreCounters:
        with self._lock:
            entries = self._index.num_kept
            return StoreCounters(entries=entries, bytes=entries * self._files.file_bytes, **self._totals)

    def close(self) -> None:
        with self._ended:
            self._is_closed = True
            self._ended.wait_for(lambda: not self._calls)
        with self._names_lock:
            self._names.close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    @contextmanager
    def _call(self) -> Iterator[bool]:
        """A call that `close` waits for. Gives whether the store is open."""
        with self._lock:
            is_open = not self._is_closed
            self._calls += 1
        try:
            yield is_open
        finally:
            with self._ended:
                self._calls -= 1
                self._ended.notify_all()

    def _read(self, key: EntryKey, into: memoryview) -> bool:
        is_own = self._reads.read_own(key, into)
        found = is_own or self._reads.join(key, into)
        with self._lock:
            self._totals["hits" if found else "misses"] += 1
            (self._index.touch if is_own else self._index.lose)(EntryFileName.of(key))
        return found

    # ---- writing

    def _write(self, name: EntryFileName, key: EntryKey, entry: memoryview) -> bool:
        self._find_more_names()
        write, leaving = self._begin(name)
        for path in leaving:
            self._evict(path)
        if write is None:
            return False
        temporary = self._files.temporary()
        try:
            self._files.write(temporary, key, entry)
            return self._end(write, temporary)
        except OSError as error:
            self._end_failed(write, temporary, error)
            return False

    def _begin(self, name: EntryFileName) -> tuple[FileWrite | None, list[str]]:
        """Makes room for a file. Returns the write, or None if there is no room, and the files that must leave."""
        with self._lock:
            write = self._index.begin(name)
            leaving: list[str] = []
            while write is not None and self._is_too_large() and len(leaving) < _REMOVED_A_WRITE:
                path = self._next_to_leave() if self._index.may_displace(write) else None
                if path is None:
                    self._index.refuse(write)
                    write = None
                else:
                    leaving.append(path)
            return write, leaving

    def _is_too_large(self) -> bool:
        leftover_bytes = self._leftovers.bytes if self._leftovers else 0
        return len(self._index) * self._files.file_bytes + leftover_bytes > self._max_bytes

    def _next_to_leave(self) -> str | None:
        path = self._leftovers.pop() if self._leftovers else None
        if path is not None:
            return path
        name = self._index.evict()
        return None if name is None else self._files.path(name)

    def _end(self, write: FileWrite, temporary: str) -> bool:
        with self._lock:
            # Under the lock, so that a drop sees either the file or the write.
            is_wanted = self._index.is_wanted(write)
            if is_wanted:
                os.rename(temporary, self._files.path(write.name))
                self._index.end(write, is_kept=True)
                self._totals["written"] += 1
        if not is_wanted:
            self._reads.unlink(temporary)
        return is_wanted

    def _end_failed(self, write: FileWrite, temporary: str, error: OSError) -> None:
        self._count("failed")
        with self._lock:
            self._index.end(write, is_kept=False)
            # Another user of the disk has filled it: this store goes on with what it has.
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            leaving = self._next_to_leave() if is_full else None
            now_s = time.monotonic()
            warns = now_s - self._warned_s > _WARN_EVERY_S
            if warns:
                self._warned_s = now_s
        if warns:
            _log.warning("KV could not be written to a file in %s: %s", self._files.folder, error.strerror)
        with suppress(OSError):
            os.unlink(temporary)
        if leaving is not None:
            self._evict(leaving)
        if isinstance(error, FileNotFoundError):
            self._open_folder()

    def _evict(self, path: str) -> None:
        if self._reads.evict(path):
            self._count("evicted")

    # ---- names

    def _find_first_names(self) -> None:
        """Looks for files for a while, and adds them so that the oldest leave first."""
        for name in self._names.first(timeout_s=_OPEN_S):
            self._add(name)

    def _find_more_names(self) -> None:
        """Looks at the next files of a round."""
        if not self._names_lock.acquire(blocking=False):
            return  # another thread does
        try:
            if self._leftovers is None:
                # Not when the store is opened: the ranks of a node open their namespaces at about the same time.
                leftovers = Leftovers(self._directory, timeout_s=_OPEN_S)
                with self._lock:
                    self._leftovers = leftovers
            had_found_all = self._names.has_found_all
            for name in self._names.more(_NAMES_A_WRITE):
                self._add(name, may_have_left=True)
            if self._names.has_found_all and not had_found_all:
                self._recall_keeps()
        finally:
            self._names_lock.release()

    def _add(self, name: str, *, may_have_left: bool = False) -> None:
        """Adds a file that was found.

        Args:
            may_have_left: its name was read some writes ago, as the kernel reads some hundred names at a time.
        """
        parsed = EntryFileName.parse(name)
        if parsed is not None:
            if may_have_left and parsed.digest not in self._index and not self._files.is_there(parsed):
                return
            with self._lock:
                self._index.add(parsed)
        elif name.startswith(TEMPORARY):
            remove_abandoned(f"{self._files.folder}/{name}")

    def _recall_keeps(self) -> None:
        """Gives the files that were found the keep times that they had before a restart."""
        self._keep_log.recall(self._keep_again, timeout_s=_OPEN_S)

    def _keep_again(self, digest: bytes, keep: KeepTime) -> list[bytes]:
        with self._lock:
            names = self._index.sequence(digest)
            self._index.keep(names, keep)
        return [name.digest for name in names]

    # ---- files

    def _new_index(self) -> FileIndex:
        return FileIndex(self._max_bytes // self._files.file_bytes)

    def _open_folder(self) -> None:
        """Makes the folder and locks it. Forgets what was in one that somebody has removed."""
        with self._lock:
            if self._folder_fd >= 0:
                os.close(self._folder_fd)
                self._folder_fd = -1
            before, self._index = self._index, self._new_index()
            self._index.replace(before)
            with suppress(OSError):
                self._folder_fd = open_locked(Path(self._files.folder))

    def _count(self, *names: str) -> None:
        with self._lock:
            self._totals.update(names)
