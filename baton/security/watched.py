"""A value read from files, and read again when one of them changes. Threads may share it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from baton.core.errors import BatonError, ConfigError
from baton.core.regular_file import read_regular_file
from baton.core.setting_names import flag, variable

T = TypeVar("T")

log = logging.getLogger("baton")

LOOK_EVERY_S = 1.0
FILE_BYTES_MAX = 16 << 20  # a bundle of every public CA has 200 kB


class Watched(Generic[T]):
    """Holds the value that `read` makes of some files.

    If changed files cannot be read, the old value stays in use, and a warning is logged.

    Args:
        read: returns the value, or raises BatonError if the files cannot be used.
        look_every_s: least seconds between two checks for changes.

    Raises:
        BatonError: from the first `read`.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], *, look_every_s: float = LOOK_EVERY_S) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._value = read()
        self._looked_at_s = time.monotonic()
        self._warned: object = None

    def get(self) -> T:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_at_s >= self._look_every_s:
                self._looked_at_s = now_s
                self._look()
            return self._value

    def _look(self) -> None:
        stamps = self._stamps()
        if stamps == self._seen:
            return
        try:
            value = self._read()
        except Exception as error:  # noqa: BLE001 - a file may have anything in it
            # The writer may not have finished; the next check tries again.
            if self._warned != stamps:
                log.warning(
                    "keeping the old value, because changed files cannot be used: %s",
                    error if isinstance(error, BatonError) else type(error).__name__,
                )
                self._warned = stamps
            return
        if stamps == self._stamps():  # else a file changed during the read
            self._value, self._seen = value, stamps
            log.info("reloaded %s", ", ".join(path.name for path in self._paths))

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_file(path: Path, field: str) -> bytes:
    """Reads the file that a setting names.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return read_regular_file(path, bytes_max=FILE_BYTES_MAX)
    except OSError as error:
        message = f"{variable(field)} ({flag(field)}) is {str(path)!r}, which cannot be read: {error.strerror}"
        raise ConfigError(message, field=field, value=path, cure="name a file that this process may read") from None
