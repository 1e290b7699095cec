"""Files that a command's flags name for its results."""

from pathlib import Path
from typing import NoReturn

from baton.core.errors import InvalidRequest
from baton.core.regular_file import check_can_write, write_regular_file


def check_output(path: Path, *, field: str) -> None:
    """To be called before the work whose result goes there.

    Raises:
        InvalidRequest: nothing can be written there.
    """
    try:
        check_can_write(path)
    except OSError as error:
        _refuse(path, error, field)


def write_output(path: Path, data: bytes | str, *, field: str) -> None:
    """Raises:
    InvalidRequest: as `check_output`.
    """
    try:
        write_regular_file(path, data)
    except OSError as error:
        _refuse(path, error, field)


def _refuse(path: Path, error: OSError, field: str) -> NoReturn:
    cure = "name a new or a regular file in a writable directory"
    raise InvalidRequest(f"cannot write {path}: {error.strerror}", field=field, value=path, cure=cure) from None
