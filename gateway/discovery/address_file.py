"""Addresses listed in a file: one a line, `#` begins a comment. The file is read again when it has changed."""

import logging
import os

from baton.errors import ConfigError
from baton.rpc.server import Address
from gateway.discovery.sources import ListFile

log = logging.getLogger("baton")

_BYTES_MAX = 1 << 20


class AddressFile:
    """A file's addresses. An unreadable or malformed file keeps the last ones, with one line in the log."""

    def __init__(self, place: ListFile) -> None:
        self._path = place.path
        self._seen: tuple[int, ...] | str = ()
        self._last: tuple[Address, ...] = ()

    def read(self) -> tuple[Address, ...]:
        """The addresses that the file has now."""
        try:
            self._read_if_changed()
        except (OSError, ConfigError, UnicodeDecodeError) as error:
            if self._seen != str(error):
                log.warning("%s is not read, and its last %d addresses stay: %s", self._path, len(self._last), error)
            self._seen = str(error)
        return self._last

    def _read_if_changed(self) -> None:
        # NOTE: Kubernetes changes a mounted file by changing a link to its folder, so the inode counts too.
        found = os.stat(self._path)
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != self._seen:
            with self._path.open("rb") as file:
                text = file.read(_BYTES_MAX).decode()
            lines = (line.partition("#")[0] for line in text.splitlines())
            parts = [part.strip() for line in lines for part in line.split(",")]
            self._last = tuple(Address.parse(part, field=str(self._path)) for part in parts if part)
            self._seen = stamp
