"""Writes the ready file: a process shows by it that it is ready."""

import json
import os
from pathlib import Path
from typing import NoReturn

from baton.core.errors import ConfigError
from baton.core.regular_file import check_can_write, write_regular_file


def check_ready_file(path: Path | None) -> None:
    """Checks that the ready file can be written, before a process starts to load for long.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        try:
            check_can_write(path)
        except OSError as error:
            _refuse(path, error)


def write_ready_file(path: Path | None, *, address: str, http: str | None = None, metrics: str | None = None) -> None:
    """Writes the file that shows that this process is ready, in one step.

    Args:
        http: address of its HTTP server.
        metrics: URL at which its metrics are scraped.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        ready = {"address": address, "http": http, "metrics": metrics, "pid": os.getpid()}
        try:
            write_regular_file(path, json.dumps(ready) + "\n")
        except OSError as error:
            _refuse(path, error)


def _refuse(path: Path, error: OSError) -> NoReturn:
    message = f"BATON_READY_FILE (--ready-file) is {str(path)!r}, which cannot be written: {error.strerror}"
    cure = "name a new file, or one of an earlier start, in a writable directory"
    raise ConfigError(message, field="ready_file", value=path, cure=cure) from None
