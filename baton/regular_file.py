"""Reads a file that somebody named: whole, but never a pipe, which would wait, or a device, which may not end."""

import os
import stat
from pathlib import Path


def read_regular_file(path: Path, *, bytes_max: int) -> bytes:
    """The file's content.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger; `strerror` says why.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is no regular file")
        if status.st_size > bytes_max:
            raise OSError(0, f"it has {status.st_size} bytes, of at most {bytes_max}")
        return file.read(bytes_max + 1)
