"""Reads and writes files that users name: only regular files, never a pipe, which would block, or a device.

A written file appears whole or not at all, and replaces only a regular file.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_regular_file(path: Path, *, bytes_max: int) -> bytes:
    """The file's content.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger; `strerror` says why.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        if status.st_size > bytes_max:
            raise OSError(0, f"it has {status.st_size} bytes, of at most {bytes_max}")
        return file.read(bytes_max + 1)


def write_regular_file(path: Path, data: bytes | str, *, mode: int | None = None) -> None:
    """Writes a new file, or a new content of a regular one, in one step.

    Args:
        data: text is written as UTF-8.
        mode: who may read and write it; None: as before, or as usual for a new file.

    Raises:
        OSError: the path names something that is not a regular file, or it cannot be written; nothing is changed then.
    """
    before = _regular_or_absent(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    part = f".{os.urandom(8).hex()}.part"
    try:
        descriptor = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode, dir_fd=folder
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                if before is not None:
                    _keep_owner_and_mode(descriptor, before, mode)
                file.write(data.encode(errors="surrogateescape") if isinstance(data, str) else data)
            _regular_or_absent(path)  # it may be something else by now
            os.rename(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(part, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def check_can_write(path: Path) -> None:
    """Checks before long work that `write_regular_file` can write there.

    Raises:
        OSError: as `write_regular_file`.
    """
    _regular_or_absent(path)
    folder = os.stat(path.parent)
    if not stat.S_ISDIR(folder.st_mode):
        raise OSError(0, f"{path.parent} is not a directory")
    part = path.parent / f".{os.urandom(8).hex()}.part"
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise OSError(0, f"nothing can be written into {path.parent}: {error.strerror}") from error
    part.unlink()


def _regular_or_absent(path: Path) -> os.stat_result | None:
    """The status of the regular file. Returns None if there is no file.

    Raises:
        OSError: the path names something else, or cannot be a file's.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        if not path.name:
            raise OSError(0, "it is a directory") from None
        return None
    except ValueError:  # it has a NUL
        raise OSError(0, "it is not a path") from None
    kind = next((kind for is_kind, kind in _KINDS if is_kind(found.st_mode)), None)
    if kind is not None:
        raise OSError(0, f"it is {kind}, no regular file")
    return found


def _keep_owner_and_mode(descriptor: int, before: os.stat_result, mode: int | None) -> None:
    with suppress(PermissionError):  # of another user's file, which then becomes ours
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode) if mode is None else mode)
