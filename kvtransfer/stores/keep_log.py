"""The keep times of the files in a folder, in a file next to them; docs/kv-files.md documents its form.

Each record names the last entry of a sequence, and with it all entries before. Several processes append to the file; a
record that another one appends during `_shorten` may be lost, and its entries then have no keep time after a restart.
"""

import hashlib
import math
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from baton.core.kv_entries import KEEP_S_MAX, KeepTime
from kvtransfer.stores.file_format import TEMPORARY

# The name of the file.
KEEP_TIMES = "keep-times"
_MAGIC = b"KEEP"
_VERSION = 1
_DIGEST_BYTES = _CHECKSUM_BYTES = 16
# Magic, version, time of writing, seconds, tenant, digest; a checksum follows.
_RECORD = struct.Struct(f"<4sIddQ{_DIGEST_BYTES}s")
RECORD_BYTES = _RECORD.size + _CHECKSUM_BYTES
_LOG_BYTES_MAX = 1 << 20
# A pipe or a link that somebody put in the file's place must not be waited for or followed.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class KeepRecord:
    """One call to keep the first entries of a sequence, or to let them leave first.

    Attributes:
        written_s: Unix time of the call.
        seconds: how long from then on; 0: they leave before all others.
        tenant: see `KeepTime`.
        digest: of the last of these entries.
    """

    written_s: float
    seconds: float
    tenant: int
    digest: bytes

    def left_s(self, now_s: float) -> float:
        """How long the record still counts, however the clock was set meanwhile; at most 0: no longer."""
        counts_s = self.seconds or KEEP_S_MAX
        return min(counts_s, self.written_s + counts_s - now_s)

    def encode(self) -> bytes:
        record = _RECORD.pack(_MAGIC, _VERSION, self.written_s, self.seconds, self.tenant, self.digest)
        return record + _checksum(record)

    @classmethod
    def decode(cls, record: bytes) -> Self | None:
        """Returns None unless it is whole, of this version, and possible."""
        if len(record) != RECORD_BYTES or _checksum(record[: _RECORD.size]) != record[_RECORD.size :]:
            return None
        magic, version, written_s, seconds, tenant, digest = _RECORD.unpack_from(record)
        if magic != _MAGIC or version != _VERSION or not (math.isfinite(written_s) and 0 <= seconds <= KEEP_S_MAX):
            return None
        return cls(written_s, seconds, tenant, digest)


class KeepLog:
    """The file of one folder, which is only there once something was kept."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = f"{folder}/{KEEP_TIMES}"

    def append(self, record: KeepRecord) -> None:
        """Adds a record. Shortens a file that has become too long first.

        Raises:
            OSError: the file cannot be written, or is no regular file.
        """
        with suppress(FileNotFoundError):
            if os.lstat(self._path).st_size + RECORD_BYTES > _LOG_BYTES_MAX:
                self._shorten(record.written_s)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, mode=0o600)
        try:
            os.write(fd, record.encode())
        finally:
            os.close(fd)

    def records(self, now_s: float) -> list[KeepRecord]:
        """The last record of each tenant and digest that still counts, in their order. A file that cannot be read has
        none."""
        latest: dict[tuple[int, bytes], KeepRecord] = {}
        for record in _records_in(self._read()):
            name = record.tenant, record.digest
            latest.pop(name, None)
            latest[name] = record
        return [record for record in latest.values() if record.left_s(now_s) > 0]

    def recall(self, keep: Callable[[bytes, KeepTime], Iterable[bytes]], *, timeout_s: float) -> None:
        """Repeats the calls that still count, until the time has passed.

        The newest one comes first. It mostly makes those of earlier turns needless.

        Args:
            keep: keeps the sequence that ends with this digest. Returns the digests of all its entries.
        """
        now_s, end_s = time.time(), time.monotonic() + timeout_s
        known: dict[tuple[bytes, int], float] = {}
        for record in reversed(self.records(now_s)):
            until_s = record.written_s + record.seconds if record.seconds else math.inf
            if time.monotonic() > end_s:
                return
            if known.get((record.digest, record.tenant), -math.inf) >= until_s:
                continue
            seconds = record.left_s(now_s) if record.seconds else 0.0
            kept = keep(record.digest, KeepTime(seconds, record.tenant))
            known |= dict.fromkeys(((digest, record.tenant) for digest in kept), until_s)

    def _read(self) -> bytes:
        try:
            fd = os.open(self._path, os.O_RDONLY | _FLAGS)
        except OSError:
            return b""
        try:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            return os.read(fd, 2 * _LOG_BYTES_MAX) if is_file else b""
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _shorten(self, now_s: float) -> None:
        """Replaces the file by one with the latest records that still count, of half the greatest size at most."""
        newest = self.records(now_s)[-(_LOG_BYTES_MAX // 2 // RECORD_BYTES) :]
        temporary = f"{self._folder}/{TEMPORARY}{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, mode=0o600)
        try:
            os.write(fd, b"".join(record.encode() for record in newest))
        except OSError:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        os.rename(temporary, self._path)


def _records_in(data: bytes) -> Iterator[KeepRecord]:
    """The whole records in a file. Between them may be the beginnings of others: a full disk leaves them."""
    start = data.find(_MAGIC)
    while start >= 0:
        record = KeepRecord.decode(data[start : start + RECORD_BYTES])
        if record is not None:
            yield record
        start = data.find(_MAGIC, start + (1 if record is None else RECORD_BYTES))


def _checksum(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=_CHECKSUM_BYTES).digest()
