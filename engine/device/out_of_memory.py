"""Tells memory that ran out from other errors, and says it in one line: for what, how much, and what helps.

Torch has an error of its own for a GPU's allocator only; a host's, NCCL's and the driver's are known by their words.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_HOST_SAYS = "can't allocate memory"
_DEVICE_SAYS = "out of memory"
_ASKED = "you tried to allocate "
_GPU_CURE = "end what else runs on it, lower --gpu-memory-fraction, --kv-cache-mib or --max-batch-tokens, or raise "
_HOST_CURE = "end what else runs here, lower --num-blocks or --kv-cache-mib, or take a smaller --dtype"


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Notes on an error of that kind what the memory was for, unless that is known."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (_on_host(error) or _on_gpu(error)) and not getattr(error, "__notes__", None):
            error.add_note(what)
        raise


def describe_out_of_memory(error: BaseException) -> str | None:
    """The line for operators; None if the error is another one."""
    wanted_for = "".join(f" for {note}" for note in getattr(error, "__notes__", ()))
    if _on_host(error):
        return f"no memory is left{wanted_for}: {_host_figures(str(error))}; {_HOST_CURE}"
    if _on_gpu(error):
        return f"the GPU has no memory left{wanted_for}: {_gpu_figures(str(error))}; {_GPU_CURE}--tensor-parallel-size"
    return None


def _on_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST_SAYS in str(error))


def _on_gpu(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _DEVICE_SAYS in str(error).lower()


def _host_figures(message: str) -> str:
    asked, _, unit = message.partition(_ASKED)[2].partition(" ")
    figures = [f"{_gib(int(asked))} were asked for"] if asked.isdigit() and unit.startswith("bytes") else []
    return ", ".join([*figures, f"{_gib(_available_bytes())} are free"])


def _gpu_figures(message: str) -> str:
    """Torch's message has a line of figures, then sentences about its allocator; others have none."""
    if "Tried to allocate" in message:
        return " ".join(message.partition(" If reserved but unallocated")[0].splitlines())
    figures = message.partition("\n")[0]
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a device that has failed altogether
            free, total = torch.cuda.mem_get_info()
            figures += f", {_gib(free)} of {_gib(total)} are free"
    return figures


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
