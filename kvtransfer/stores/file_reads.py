"""What a store in files reads and removes: its own files and, where one is missing, those of other numbers of ranks.

A file that is not what it must be is removed. Errors of the disk are counted, not raised. No torch.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.core.kv_entries import EntryKey
from kvtransfer.stores.entry_files import EntryFiles
from kvtransfer.stores.file_format import EntryFileName
from kvtransfer.stores.known_digests import KnownDigests


class Joinable(Protocol):
    """Files of another number of ranks: `kvtransfer.stores.joined_files.JoinedFiles`."""

    def has(self, key: EntryKey) -> bool: ...

    def read(self, key: EntryKey, into: memoryview) -> bool: ...

    def paths(self, key: EntryKey) -> list[str]: ...

    def found(self, most: int) -> list[EntryKey]: ...


class FileReads:
    """
    Args:
        count: counts one event of a store: `damaged` or `failed`.
    """

    def __init__(self, own: EntryFiles, joined: Sequence[Joinable], count: Callable[[str], None]) -> None:
        self._own = own
        self._joined = joined
        self._count = count
        self._listed = KnownDigests()  # what `found_joined` has returned

    def has_own(self, key: EntryKey) -> bool:
        return self._has(self._own, key)

    def can_join(self, key: EntryKey) -> bool:
        """Whether the files of another number of ranks have an entry."""
        found = any(self._has(joined, key) for joined in self._joined)
        if not found:
            self._listed.missed((key,))
        return found

    def read_own(self, key: EntryKey, into: memoryview) -> bool:
        return self._read(self._own, key, into)

    def join(self, key: EntryKey, into: memoryview) -> bool:
        """Reads an entry from the files of another number of ranks."""
        found = any(self._read(joined, key, into) for joined in self._joined)
        if not found:
            self._listed.missed((key,))
        return found

    def remove(self, key: EntryKey) -> None:
        """Removes every file of an entry."""
        self._remove(self._own, key)
        for joined in self._joined:
            self._remove(joined, key)
        self._listed.missed((key,))

    def evict(self, path: str) -> bool:
        """Removes a file of any namespace to make room. Returns whether this call did."""
        name = EntryFileName.parse(os.path.basename(path))
        if name is not None:
            self._listed.missed_digests((name.digest,))
        return self.unlink(path)

    def unlink(self, path: str) -> bool:
        """Removes a file. Returns whether this call did."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError:
            self._count("failed")
            return False
        return True

    def found_joined(self, most: int) -> list[EntryKey]:
        """Keys of up to so many entries that other numbers of ranks have left."""
        keys: list[EntryKey] = []
        for joined in self._joined:
            try:
                keys += joined.found(most - len(keys))
            except OSError:
                self._count("failed")
        self._listed.seen(keys)
        # Only from now on it is noticed when a file leaves, so they are looked for again.
        return [key for key in keys if self.can_join(key)]

    def forget_roots(self, roots: frozenset[bytes]) -> None:
        """The entries with one of these roots are dropped."""
        self._listed.drop_roots(roots)

    def take_lost(self) -> list[bytes]:
        """Digests of entries that `found_joined` has returned and that have lost a file since. Never waits."""
        return self._listed.take_lost()

    def _has(self, files: EntryFiles | Joinable, key: EntryKey) -> bool:
        try:
            return files.has(key)
        except OSError:
            self._count("failed")
            return False

    def _read(self, files: EntryFiles | Joinable, key: EntryKey, into: memoryview) -> bool:
        try:
            if files.read(key, into):
                return True
        except FileNotFoundError:
            return False
        except OSError:
            self._count("failed")
            return False
        self._count("damaged")
        self._remove(files, key)
        return False

    def _remove(self, files: EntryFiles | Joinable, key: EntryKey) -> None:
        for path in files.paths(key):
            self.unlink(path)
