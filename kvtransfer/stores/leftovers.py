"""Files of namespaces that no process has open: entries of another model, layout, number of ranks or format.

They count against the bound of whoever opens the directory, and are the first to leave. An open namespace has a shared
lock, so nodes of different models can share a directory.
"""

import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.stores.file_format import TEMPORARY, VERSION, EntryFileName
from kvtransfer.stores.keep_log import KEEP_TIMES

_LOCK_TRIES, _LOCK_EACH_S = 50, 1e-3
_NAMESPACE = re.compile(r"v\d+-([0-9a-f]{2})+")


def namespace_folder(namespace: bytes) -> str:
    """The name of a namespace's folder."""
    return f"v{VERSION}-{namespace.hex()}"


def namespace_folders(directory: Path) -> list[str]:
    """The folders of all namespaces in a directory, of any version of the format.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        with os.scandir(directory) as found:
            return [each.path for each in found if _NAMESPACE.fullmatch(each.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_locked(folder: Path) -> int:
    """Makes a folder that only this user may read, if it is not there, and locks it as open. Returns a descriptor.

    Raises:
        OSError: the folder cannot be made or read.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # another process looks whether the folder is idle, for some microseconds
            time.sleep(_LOCK_EACH_S)
        except OSError:  # a filesystem without locks: other processes take the files for leftovers, or leave them
            break
    return fd


def _is_idle(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@dataclass(frozen=True)
class _Leftover:
    path: Path
    file_bytes: int


class Leftovers:
    """The files that idle namespaces of a directory had when it was made, those of the oldest namespace first.

    Args:
        timeout_s: no further file is looked for after this time.
    """

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        self._files = deque(_leftovers(directory, timeout_s))
        self.bytes = sum(file.file_bytes for file in self._files)

    def pop(self) -> str | None:
        """Takes out the first file whose namespace is still idle, and returns its path; None if there is none."""
        while self._files:
            file = self._files.popleft()
            self.bytes -= file.file_bytes
            if _is_idle(file.path.parent):
                return str(file.path)
        return None


def _leftovers(directory: Path, timeout_s: float) -> Iterator[_Leftover]:
    end_s = time.monotonic() + timeout_s
    for folder in _idle_folders(directory):
        with suppress(OSError):
            if os.listdir(folder) == [KEEP_TIMES]:
                (folder / KEEP_TIMES).unlink()
            folder.rmdir()  # only an empty one
        with suppress(OSError), os.scandir(folder) as found:
            for each in found:
                if time.monotonic() > end_s:
                    return
                if each.name.startswith(TEMPORARY) or EntryFileName.parse(each.name) is not None:
                    with suppress(FileNotFoundError):  # another rank has just removed it
                        yield _Leftover(Path(each.path), each.stat(follow_symlinks=False).st_size)


def _idle_folders(directory: Path) -> list[Path]:
    """The oldest first."""
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for each in directory.iterdir():
            if _NAMESPACE.fullmatch(each.name) and _is_idle(each):
                with suppress(FileNotFoundError):  # another rank has just removed it
                    found.append((each.stat().st_mtime, each))
    return [folder for _, folder in sorted(found)]
