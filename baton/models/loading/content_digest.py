"""Digests every byte of a checkpoint's tensors, in threads, while the weights load.

Definition. A tensor's number is the SHA-256 of name, dtype and shape and of the SHA-256 of each 16 MiB of data.
The content digest is the sum of all tensors' numbers, mod 2**256: it does not depend on how they are spread over files.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor
from baton.models.loading.digest_cache import DigestCache

_PIECE_BYTES = 16 << 20
_READ_BYTES = 1 << 20  # stays in a core's cache between read and hash
_MAX_THREADS = 16
_MODULUS = 1 << 256


@contextmanager
def content_digest(stored: Mapping[str, StoredTensor], cache: DigestCache) -> Iterator[Callable[[], str]]:
    """Computes the digest, 64 hex digits, in threads of its own while the body runs, and stops with the body.

    Threads read at the same time as those that load the weights, so a file that fits into the page cache comes from
    the disk once. Files that `cache` knows are not read.

    Yields:
        waits for the digest; raises ConfigError if a file cannot be read, or has changed since the body began.
    """
    stop = Event()
    files = {tensor.file for tensor in stored.values()}
    before = {file: _version(file) for file in files}

    def wait() -> str:
        whole = digest.result()
        # NOTE: weights are not read and hashed at the same moment. With a file that is still being copied, the node
        # would serve the old content under the digest of the new.
        for file in sorted(files):
            if _version(file) != before[file]:
                raise _changed(file)
        return whole

    with ThreadPoolExecutor(1, thread_name_prefix="content") as thread:
        digest = thread.submit(_content_digest, list(stored.values()), cache, stop)
        try:
            yield wait
        finally:
            stop.set()


def _content_digest(tensors: Sequence[StoredTensor], cache: DigestCache, stop: Event) -> str:
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    total = 0
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="content") as threads:
        for file, its_tensors in sorted(by_file.items()):
            in_order = sorted(its_tensors, key=lambda tensor: (tensor.start, tensor.stop, tensor.name))
            total += _file_number(file, in_order, cache, threads, stop)
    return f"{total % _MODULUS:064x}"


def _file_number(
    file: Path, tensors: Sequence[StoredTensor], cache: DigestCache, threads: ThreadPoolExecutor, stop: Event
) -> int:
    """Returns the sum of the numbers of the file's tensors, mod 2**256."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise _unreadable(file, "it is not a regular file")
            headings = [_heading(tensor) for tensor in tensors]
            places = [(tensor.start, tensor.stop) for tensor in tensors]
            key = cache.key(file, before, json.dumps([headings, places]))
            known = cache.get(key)
            if known is not None:
                return known
            number = _hash_tensors(file, descriptor, tensors, threads, stop)
            cache.put(key, number, before, os.fstat(descriptor))
            return number
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from error


def _hash_tensors(
    file: Path, descriptor: int, tensors: Sequence[StoredTensor], threads: ThreadPoolExecutor, stop: Event
) -> int:
    pieces = [range(tensor.start, tensor.stop, _PIECE_BYTES) for tensor in tensors]
    ends = [tensor.stop for tensor in tensors]
    jobs = [
        (start, min(start + _PIECE_BYTES, end)) for starts, end in zip(pieces, ends, strict=True) for start in starts
    ]
    digests = threads.map(partial(_hash_piece, file, descriptor, stop), jobs)
    number = 0
    for tensor, starts in zip(tensors, pieces, strict=True):
        whole = hashlib.sha256(_heading(tensor).encode())
        for _ in starts:
            whole.update(next(digests))
        number += int.from_bytes(whole.digest())
    return number % _MODULUS


def _hash_piece(file: Path, descriptor: int, stop: Event, place: tuple[int, int]) -> bytes:
    position, end = place
    buffer = memoryview(bytearray(min(_READ_BYTES, end - position)))
    digest = hashlib.sha256()
    while position < end and not stop.is_set():
        num_bytes = os.preadv(descriptor, [buffer[: end - position]], position)
        if num_bytes == 0:
            raise _unreadable(file, f"it ends before byte {position}")
        digest.update(buffer[:num_bytes])
        position += num_bytes
    if position < end:
        raise CancelledError  # nothing of this file is kept
    return digest.digest()


def _version(file: Path) -> tuple[int, ...]:
    """Returns a value that changes when the file is written or replaced."""
    try:
        status = file.stat()
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _heading(tensor: StoredTensor) -> str:
    return json.dumps([tensor.name, tensor.dtype, tensor.shape])


def _num_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _changed(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} has changed while it was loaded",
        field="model",
        value=str(file),
        cure="start the node again once the checkpoint is complete",
    )


def _unreadable(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot read {file}: {why}", field="model", value=str(file), cure="download the checkpoint again"
    )
