"""Checks that the host does not wait for the GPU, and holds streams of the GPU."""

import ctypes
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


@contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    """What is queued on the stream inside this context does not run before its end."""
    value = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    wait = ctypes.PyDLL("libcuda.so.1").cuStreamWaitValue32_v2
    wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    status = wait(stream.cuda_stream, value.data_ptr(), 1, 0)  # until the value is at least 1
    assert status == 0, f"the driver did not hold the stream (status {status})"
    try:
        yield
    finally:
        value.fill_(1)
        stream.synchronize()


def _set_mode(mode: str) -> None:
    # NOTE: torch sets the mode, then warns. Where warnings are errors the call would raise with the mode left on, and
    # every later test of the process would fail.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)
