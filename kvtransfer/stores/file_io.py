"""Reads and writes whole files, around the page cache where memory and filesystem allow that.

Measured on a virtual disk with files of 1 to 8 MB that the page cache does not have: reads around it are 1.1 to 2.9
times as fast, with at most a quarter of the CPU time. Entries that are read again soon are in host memory anyway.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

# Kernels want memory, sizes and offsets at multiples of a disk's block, which is no larger than that.
_ALIGN_BYTES = 4096
# A pipe or a link that somebody put in a file's place must not be waited for or followed.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_Vector: TypeAlias = Callable[[int, Sequence[memoryview], int], int]


def read_whole(path: str, buffers: Sequence[memoryview]) -> bool:
    """Fills the buffers from a file. Returns False if it is no regular file of exactly their size.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    return _around_cache(path, os.O_RDONLY, buffers, _read)


def read_head(path: str, num_bytes: int) -> bytes:
    """The first bytes of a file, or all of a shorter one.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        return os.read(fd, num_bytes)
    finally:
        os.close(fd)


def write_whole(path: str, buffers: Sequence[memoryview]) -> None:
    """Writes the buffers as a new file that only this user may read. After an error there may be a part of it.

    It is not flushed to the disk: what a power failure damages, readers find.

    Raises:
        OSError: the file cannot be written.
    """
    _around_cache(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, buffers, _write)


def _around_cache(
    path: str, flags: int, buffers: Sequence[memoryview], use: Callable[[int, Sequence[memoryview]], bool]
) -> bool:
    direct = os.O_DIRECT if all(map(_is_aligned, buffers)) else 0
    flags |= _FLAGS
    while True:
        try:
            fd = os.open(path, flags | direct, mode=0o600)
            try:
                return use(fd, buffers)
            finally:
                os.close(fd)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = 0  # this filesystem cannot do it


def _is_aligned(buffer: memoryview) -> bool:
    address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    return address % _ALIGN_BYTES == 0 and buffer.nbytes % _ALIGN_BYTES == 0


def _read(fd: int, buffers: Sequence[memoryview]) -> bool:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != sum(buffer.nbytes for buffer in buffers):
        return False
    return _all(os.preadv, fd, buffers)


def _write(fd: int, buffers: Sequence[memoryview]) -> bool:
    if not _all(os.pwritev, fd, buffers):
        raise OSError(errno.EIO, "nothing was written")
    return True


def _all(vector: _Vector, fd: int, buffers: Sequence[memoryview]) -> bool:
    """Moves all bytes, in as many calls as the kernel wants. Returns False if a call moves none."""
    left, offset = list(buffers), 0
    while left:
        moved = vector(fd, left, offset)
        if not moved:
            return False
        offset += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]
    return True
