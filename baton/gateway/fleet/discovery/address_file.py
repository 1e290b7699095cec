"""Addresses listed in a file: one a line, `#` begins a comment. The file is read again when it has changed."""

import logging
import os

from baton.core.errors import ConfigError
from baton.core.regular_file import read_regular_file
from baton.gateway.fleet.discovery.sources import ADDRESSES_MAX, ListFile
from baton.rpc.server import ListenAddress

log = logging.getLogger("baton")

_BYTES_MAX = 1 << 20


class AddressFile:
    """A file's addresses. An unreadable or malformed file keeps the last ones, with one line in the log."""

    def __init__(self, place: ListFile) -> None:
        self._path = place.path
        self._seen: tuple[int, ...] | str = ()
        self._last: tuple[ListenAddress, ...] = ()

    def read(self) -> tuple[ListenAddress, ...]:
        """The addresses that the file has now."""
        try:
            self._read_if_changed()
        except (OSError, ConfigError, UnicodeDecodeError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            if self._seen != why:
                log.warning("%s is not read, and its last %d addresses stay: %s", self._path, len(self._last), why)
            self._seen = why
        return self._last

    def _read_if_changed(self) -> None:
        # NOTE: Kubernetes changes a mounted file by changing a link to its folder, so the inode counts too.
        found = os.stat(self._path)
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != self._seen:
            text = read_regular_file(self._path, bytes_max=_BYTES_MAX).decode()
            lines = (line.partition("#")[0] for line in text.splitlines())
            parts = [part.strip() for line in lines for part in line.split(",")]
            listed = [part for part in parts if part]
            if len(listed) > ADDRESSES_MAX:
                raise ConfigError(f"it lists {len(listed)} addresses", allowed=(f"at most {ADDRESSES_MAX}",))
            self._last = tuple(ListenAddress.parse(part, field=str(self._path)) for part in listed)
            self._seen = stamp
