"""Writes the files that a command's flags name for its results."""

from pathlib import Path
from typing import NoReturn

from baton.core.errors import InvalidRequest
from baton.core.regular_file import check_can_write, write_regular_file


def check_output(path: Path, *, field: str) -> None:
    """Checks that the file can be written. Call it before the work whose result the file gets.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    try:
        check_can_write(path)
    except OSError as error:
        _refuse(path, error, field)


def write_output(path: Path, data: bytes | str, *, field: str) -> None:
    """Writes the file in one step.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    try:
        write_regular_file(path, data)
    except OSError as error:
        _refuse(path, error, field)


def _refuse(path: Path, error: OSError, field: str) -> NoReturn:
    cure = "name a new file, or an existing regular file, in a writable directory"
    raise InvalidRequest(f"cannot write {path}: {error.strerror}", field=field, value=path, cure=cure) from None
