"""Finds the files of a store by their names: those of one folder in rounds, and those of a root in all folders.

Other processes add and remove files meanwhile. No file is opened, except temporary ones, whose names say nothing, and
by `keys_of`.
"""

import os
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path

from baton.core.kv_entries import EntryKey
from kvtransfer.stores.file_format import HEADER_BYTES, TEMPORARY, EntryFileName, decode_header, may_have_root
from kvtransfer.stores.file_io import read_head
from kvtransfer.stores.leftovers import namespace_folders

# A temporary file of this age has no writer any more.
_ABANDONED_S = 3600.0
# A drop takes one of this age for abandoned: a live writer's grows all the time, and its own process drops it too.
_DROPPED_AFTER_S = 60.0


class FolderNames:
    """Rounds through all names in a folder, which may be missing. One thread at a time uses it.

    Attributes:
        has_found_all: whether a round has ended.
    """

    def __init__(self, folder: str) -> None:
        self.has_found_all = False
        self._folder = folder
        self._round = self._found()

    def first(self, *, timeout_s: float) -> list[str]:
        """Names that are found in this time, those of the oldest files first."""
        end_s = time.monotonic() + timeout_s
        found = []
        for each in self._round:
            with suppress(OSError):
                found.append((each.stat(follow_symlinks=False).st_mtime, each.name))
            if time.monotonic() > end_s:
                break
        else:
            self.has_found_all = True
        return [name for _, name in sorted(found)]

    def more(self, count: int) -> list[str]:
        """The next names of a round; fewer than `count` if the round ends with them. The next call begins another."""
        names: list[str] = []
        while len(names) < count:
            each = next(self._round, None)
            if each is None:
                self._round = self._found()
                self.has_found_all = True
                break
            names.append(each.name)
        return names

    def close(self) -> None:
        self._round.close()

    def _found(self) -> Generator[os.DirEntry[str], None, None]:
        with suppress(OSError), os.scandir(self._folder) as found:
            yield from found


def files_of_roots(directory: Path, roots: frozenset[bytes]) -> list[str]:
    """The files with one of these roots, of all namespaces, also those that killed writers have left.

    Raises:
        OSError: a folder cannot be read.
    """
    paths: list[str] = []
    texts = frozenset(root.hex() for root in roots)
    for folder in namespace_folders(directory):
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
            # To parse a name takes 3 us, and a directory may have a million.
            likely = (each for each in found if may_have_root(each.name, texts))
            paths += [each.path for each in likely if _root_of(each) in roots]
    return paths


def keys_of(folder: str, names: Iterable[EntryFileName], namespace: bytes, entry_bytes: int) -> list[EntryKey]:
    """The keys of entries, with their tokens, from the headers of these files. Leaves out files whose header is not
    what it must be."""
    keys = []
    for name in names:
        header = None
        with suppress(OSError):
            header = decode_header(read_head(f"{folder}/{name}", HEADER_BYTES))
        if header is None or EntryFileName.of(header.key) != name:
            continue
        if (header.namespace, header.entry_bytes) == (namespace, entry_bytes):
            keys.append(header.key)
    return keys


def remove_abandoned(path: str) -> None:
    """Removes a temporary file that is so old that its writer must have ended."""
    with suppress(OSError):
        if time.time() - os.lstat(path).st_mtime > _ABANDONED_S:
            os.unlink(path)


def _root_of(file: os.DirEntry[str]) -> bytes | None:
    """The root of the entry in a file. Returns None if there is no entry, or if it is being written."""
    if file.name.startswith(TEMPORARY):
        with suppress(OSError):
            if time.time() - file.stat(follow_symlinks=False).st_mtime > _DROPPED_AFTER_S:
                header = decode_header(read_head(file.path, HEADER_BYTES))
                return None if header is None else header.key.root
        return None
    name = EntryFileName.parse(file.name)
    return None if name is None else name.root
