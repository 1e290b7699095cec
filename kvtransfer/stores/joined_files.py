"""Files of nodes with another number of ranks, as one rank reads them: joined to entries of its own.

Such files are found when a store is opened, so a node that meets none pays nothing for them. They are only read, or
removed; what was read is written anew as an own file (`Store.knows`).
"""

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from baton.core.errors import ConfigError
from baton.core.kv_entries import EntryKey
from baton.kvcache.spec import KVCacheSpec
from kvtransfer.entry_joins import EntryJoin, JoinPart
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.entry_files import EntryFiles
from kvtransfer.stores.file_format import EntryFileName
from kvtransfer.stores.file_index import FileIndex
from kvtransfer.stores.file_names import FolderNames, keys_of
from kvtransfer.stores.leftovers import namespace_folders

# As many as a node may have.
_RANKS_MAX = 64
_FIND_S = 1.0


class JoinedFiles:
    """The files of one other number of ranks. Any thread may use it.

    Args:
        files: of each layout of the join.
    """

    def __init__(self, join: EntryJoin, files: Sequence[EntryFiles]) -> None:
        self._join = join
        self._files = dict(zip(join.layouts, files, strict=True))

    def has(self, key: EntryKey) -> bool:
        """Whether every file is there that the entry, or the state that it is a piece of, is joined from.

        Raises:
            OSError: the filesystem cannot say it.
        """
        return all(self._files[part.layout].has(part.key(key)) for part in self._join.needed(key))

    def read(self, key: EntryKey, into: memoryview) -> bool:
        """Joins an entry. Returns False if a file or an entry in it is not what it must be.

        Raises:
            OSError: a file is missing, or cannot be read.
        """
        entry = torch.frombuffer(into, dtype=torch.uint8)
        if not all(self._copy(part, key, entry) for part in self._join.parts(key)):
            return False
        self._join.complete(key, entry)
        return True

    def paths(self, key: EntryKey) -> list[str]:
        """The files that an entry is joined from."""
        parts = self._join.parts(key)
        return [path for part in parts for path in self._files[part.layout].paths(part.key(key))]

    def found(self, most: int) -> list[EntryKey]:
        """Keys of up to so many entries, the latest ones and those before each."""
        files, index = next(iter(self._files.values())), FileIndex()
        for text in FolderNames(files.folder).first(timeout_s=_FIND_S):
            name = EntryFileName.parse(text)
            if name is not None:
                index.add(name)
        there: dict[bytes, EntryKey] = {}
        for key in keys_of(files.folder, index.latest(most), files.namespace, files.entry_bytes):
            if (key.block.parent == key.root or key.block.parent in there) and self.has(key):
                there[key.block.digest] = key
        return list(there.values())

    def _copy(self, part: JoinPart, key: EntryKey, entry: torch.Tensor) -> bool:
        files = self._files[part.layout]
        memory = memoryview(mmap.mmap(-1, files.entry_bytes))
        if not files.read(part.key(key), memory):
            return False
        return part.copy(key, torch.frombuffer(memory, dtype=torch.uint8), entry)


def joined_files(
    directory: Path, ours: EntryLayout, spec: KVCacheSpec, named: Callable[[bytes], bytes]
) -> tuple[JoinedFiles, ...]:
    """The files that nodes with other numbers of ranks have left in a directory.

    Args:
        ours: layout of this rank's entries.
        spec: of the whole model.
        named: the namespace of files, from that of their layout.
    """
    try:
        folders = frozenset(namespace_folders(directory))
    except OSError:
        return ()
    found: dict[tuple[EntryFiles, ...], JoinedFiles] = {}
    for ranks in range(1, _RANKS_MAX + 1) if folders else ():
        try:
            join = EntryJoin(ours, spec, ranks)
        except ConfigError:
            continue  # no node of this model has so many
        files = tuple(EntryFiles.within(directory, named(each.namespace), each.entry_bytes) for each in join.layouts)
        # Our own files, and maybe those of ranks that hold the same heads of some parts.
        is_ours = ours.namespace in [each.namespace for each in join.layouts]
        if not is_ours and folders.issuperset(each.folder for each in files):
            found.setdefault(files, JoinedFiles(join, files))
    return tuple(found.values())
