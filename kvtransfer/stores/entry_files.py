"""The files of one namespace, each with one entry: their names, and how they are read and written.

It knows neither which files there are nor which of them leave. Any thread may use it.
"""

import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from baton.core.kv_entries import EntryKey
from kvtransfer.stores.file_format import HEADER_BYTES, TEMPORARY, EntryFileName, FileHeader
from kvtransfer.stores.file_io import read_whole, write_whole
from kvtransfer.stores.leftovers import namespace_folder


@dataclass(frozen=True)
class EntryFiles:
    """
    Attributes:
        folder: of the namespace; it may be missing.
        entry_bytes: size of every entry.
    """

    folder: str
    namespace: bytes
    entry_bytes: int

    @classmethod
    def within(cls, directory: Path, namespace: bytes, entry_bytes: int) -> "EntryFiles":
        """The files of a namespace in a directory with the folders of several."""
        return cls(str(directory / namespace_folder(namespace)), namespace, entry_bytes)

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.entry_bytes

    def path(self, name: EntryFileName) -> str:
        # As text: making a Path takes as long as asking the filesystem.
        return f"{self.folder}/{name}"

    def is_there(self, name: EntryFileName) -> bool:
        """Whether there is a file of that name, as far as the filesystem can say it."""
        return os.path.lexists(self.path(name))

    def paths(self, key: EntryKey) -> list[str]:
        """The one file of an entry."""
        return [self.path(EntryFileName.of(key))]

    def has(self, key: EntryKey) -> bool:
        """Whether there is a file of the right size.

        Raises:
            OSError: the filesystem cannot say it.
        """
        try:
            found = os.lstat(self.path(EntryFileName.of(key)))
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == self.file_bytes

    def read(self, key: EntryKey, into: memoryview) -> bool:
        """Reads an entry. Returns False if its file is not what it must be; the entry itself is not checked.

        Raises:
            OSError: there is no such file, or it cannot be read.
        """
        page = _page()
        return read_whole(self.path(EntryFileName.of(key)), (page, into)) and page == self._header(key)

    def temporary(self) -> str:
        """A path for a file that is being written."""
        return f"{self.folder}/{TEMPORARY}{secrets.token_hex(8)}"

    def write(self, path: str, key: EntryKey, entry: memoryview) -> None:
        """Writes the file of an entry.

        Raises:
            OSError: it cannot be written; a part of it may be there.
        """
        page = _page()
        page[:] = self._header(key)
        write_whole(path, (page, entry))

    def _header(self, key: EntryKey) -> bytes:
        return FileHeader(self.namespace, key, self.entry_bytes).encode()


def _page() -> memoryview:
    """Memory for a header, at the begin of a page."""
    return memoryview(mmap.mmap(-1, HEADER_BYTES))
