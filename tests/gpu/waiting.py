"""Checks that the host does not wait for the GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """A call that torch knows to wait for the GPU raises inside this context."""
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    # NOTE: torch sets the mode, then warns. Where warnings are errors the call would raise with the mode left on, and
    # every later test of the process would fail.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)
