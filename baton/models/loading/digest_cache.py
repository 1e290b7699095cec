"""Caches content digests of files, in one small file of the user's cache directory.

An entry holds for a file of the same place, inode, size and times. A wrong cache costs time only:
files are hashed again.
"""

import hashlib
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

_FILE = "weights-v1"
_MAX_ENTRIES = 4096
_ENTRY = re.compile(r"^([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{16})$", re.MULTILINE)  # key, value, check
_ENTRY_BYTES = 64 + 1 + 64 + 1 + 16 + 1
# File systems count time in steps of up to 2 s. A file can change again, unseen, within the step of its last change.
_SETTLE_S = 2.0


class DigestCache:
    """Digests of files that have not changed, kept in a directory.

    Args:
        directory: created for the first entry; None: nothing is cached.
        settle_s: only files unchanged for this long are cached.
        max_entries: beyond this number the oldest entries are dropped.
    """

    def __init__(self, directory: Path | None, *, settle_s: float = _SETTLE_S, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._settle_ns = int(settle_s * 1e9)
        self._file = None if directory is None else directory / _FILE

    @staticmethod
    def key(file: Path, status: os.stat_result, content: str) -> str:
        """Returns the key of the hashed content.

        Args:
            content: names the hashed parts of the file.
        """
        times = (status.st_mtime_ns, status.st_ctime_ns)
        place = (os.path.realpath(file), status.st_dev, status.st_ino, status.st_size, *times)
        return hashlib.sha256(f"{place!r} {content}".encode(errors="surrogateescape")).hexdigest()

    def get(self, key: str) -> int | None:
        """Returns a file's number; None if it is not cached."""
        value = self._entries().get(key)
        return None if value is None else int(value, 16)

    def put(self, key: str, number: int, before: os.stat_result, after: os.stat_result) -> None:
        """Keeps a file's number.

        Args:
            before, after: the file's status before and after it was hashed. A file that has just changed is not kept.
        """
        changed_ns = max(before.st_mtime_ns, before.st_ctime_ns)
        unchanged = _place(before) == _place(after) and 0 < changed_ns < time.time_ns() - self._settle_ns
        if self._file is None or not unchanged:
            return
        entries = self._entries()
        entries.pop(key, None)
        entries[key] = f"{number:064x}"
        with suppress(OSError):
            _write(self._file, list(entries.items())[-self._max_entries :])

    def _entries(self) -> dict[str, str]:
        """Returns key and value of each valid entry, the oldest first."""
        if self._file is None:
            return {}
        try:
            descriptor = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return {}
                text = file.read(self._max_entries * _ENTRY_BYTES).decode("ascii", errors="replace")
        except OSError:
            return {}
        return {key: value for key, value, check in _ENTRY.findall(text) if check == _check(key, value)}


def _place(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _check(key: str, value: str) -> str:
    return hashlib.sha256(f"{key} {value}".encode()).hexdigest()[:16]


def _write(file: Path, entries: list[tuple[str, str]]) -> None:
    """Replaces the file atomically, so that readers find it whole; if two processes write, the later file wins."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if file.is_symlink() or (file.exists() and not file.is_file()):
        return
    text = "".join(f"{key} {value} {_check(key, value)}\n" for key, value in entries)
    with NamedTemporaryFile("w", dir=file.parent, prefix=f".{_FILE}-", delete=False) as temporary:
        try:
            temporary.write(text)
            temporary.close()
            os.replace(temporary.name, file)
        except OSError:
            Path(temporary.name).unlink(missing_ok=True)
            raise
