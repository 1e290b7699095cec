"""Recognizes errors that mean out of memory, and describes them in one line: purpose, amounts, and what helps.

Torch has an error class only for a GPU's allocator. Errors of the host, NCCL and the driver are known by their text.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

_HOST_TEXT = "can't allocate memory"
_DEVICE_TEXT = "out of memory"
_REQUESTED = "you tried to allocate "
_GPU_CURE = "end other processes on it, lower --gpu-memory-fraction, --kv-cache-mib or --max-batch-tokens, or raise "
_HOST_CURE = "end other processes here, lower --kv-cache-mib, or use a smaller --dtype"


@contextmanager
def allocating(purpose: str) -> Iterator[None]:
    """Adds the purpose of the memory to an out-of-memory error, unless an inner context has done so."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (_on_host(error) or _on_gpu(error)) and not getattr(error, "__notes__", None):
            error.add_note(purpose)
        raise


def describe_out_of_memory(error: BaseException) -> str | None:
    """The line for operators; None if the error has another cause."""
    purpose = "".join(f" for {note}" for note in getattr(error, "__notes__", ()))
    if _on_host(error):
        return f"no memory is left{purpose}: {_host_amounts(str(error))}; {_HOST_CURE}"
    if _on_gpu(error):
        return f"the GPU has no memory left{purpose}: {_gpu_amounts(str(error))}; {_GPU_CURE}--tensor-parallel-size"
    return None


def _on_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST_TEXT in str(error))


def _on_gpu(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _DEVICE_TEXT in str(error).lower()


def _host_amounts(message: str) -> str:
    amount, _, unit = message.partition(_REQUESTED)[2].partition(" ")
    amounts = [f"{_gib(int(amount))} were asked for"] if amount.isdigit() and unit.startswith("bytes") else []
    return ", ".join([*amounts, f"{_gib(psutil.virtual_memory().available)} are free"])


def _gpu_amounts(message: str) -> str:
    """The amounts in an error's message. Torch's has a line of them, then sentences about its allocator; others have
    none."""
    if "Tried to allocate" in message:
        return " ".join(message.partition(" If reserved but unallocated")[0].splitlines())
    amounts = message.partition("\n")[0]
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # the device may have failed altogether
            free, total = torch.cuda.mem_get_info()
            amounts += f", {_gib(free)} of {_gib(total)} are free"
    return amounts


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
