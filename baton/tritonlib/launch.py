"""Kernel launches: compiled for a GPU or interpreted on a CPU, in sequence or overlapping, by Triton or prepared.

Overlapping launches (programmatic dependent launch) save most of the time between a decode step's kernels: programs
start while the previous kernel still runs, and wait for its end inside. `await_predecessors` returns when the previous
kernel and all before it have ended, provided that EVERY program of EVERY overlapping kernel calls it. So such a kernel
writes nothing before the wait, and loads only what was complete at the last plain launch: weights, and a step's
lengths, slots and block tables. If the previous kernel calls `start_dependents` only after its own wait, this one may
also load, past L1, what was complete before the previous kernel. It may prefetch anything into L2. A kernel whose warps
redistribute registers calls `start_dependents` only after that (see `attention.kernels.mla.hopper`).
"""

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

# Whole decode steps on an H200, at a context of 1024 tokens. Llama-3.1-8B with the library's products: overlapping
# saves 0.9 % at 1 row, and costs 0.7 % at 32, 4.5 % at 128 and 5.3 % at 256; products for few rows need it up to 32,
# and overlapping at 64 costs 1 %. DeepSeek-V2-Lite, with more and shorter kernels: it saves 15 % at 1 row, 6 % at 8,
# 4 % at 32.
MOST_OVERLAPPING_ROWS = 32
_SHARED_BYTES_OF_HOPPER = 232_448
_SHARED_BYTES_OF_MOST = 101_376  # of all GPUs from Ampere on, for a torch that does not know


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1, read by Triton when a kernel is defined).

    Its bf16 products are wrong, so kernels that multiply matrices cast to float32 there.
    """
    return bool(triton.knobs.runtime.interpret)


def overlap(device: torch.device, *, rows: int) -> dict[str, bool]:
    """Launch options for a kernel that has the constexpr OVERLAP and passes it to `await_predecessors` and
    `start_dependents`.

    Args:
        rows: tokens of the launch, or an upper bound.
    """
    small = rows <= MOST_OVERLAPPING_ROWS and _can_overlap(device)
    return {"OVERLAP": True, "launch_pdl": True} if small else {"OVERLAP": False}


def shared_bytes(device: torch.device) -> int:
    """The most shared memory of one program; an H200's where kernels are interpreted, or only compiled."""
    if device.type != "cuda":
        return _SHARED_BYTES_OF_HOPPER
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _SHARED_BYTES_OF_MOST))


def overlap_alike(device: torch.device, *, rows: int) -> dict[str, bool]:
    """Does what `overlap` does, with one compiled kernel for any number of rows, so that these do not change its bits:
    without an overlapping launch, waiting and starting dependents are nothing."""
    return {"OVERLAP": _can_overlap(device), "launch_pdl": rows <= MOST_OVERLAPPING_ROWS and _can_overlap(device)}


class PreparedKernel:
    """A kernel that is compiled once, for one device and one set of constants.

    Triton inspects every argument of every launch to find out what to compile. Here that is fixed beforehand, which
    saves most of a launch's time on the host. So the kernel's numbers are annotated with their types and not
    specialised, and its constants say by what the numbers are divisible.

    Args:
        kernel: its constants are its last parameters.
        device: the thread's current device at each launch; the CPU where kernels are interpreted.
        examples: a dtype for each pointer, and any value for each number.
    """

    ALIGN_BYTES = 16

    def __init__(
        self,
        kernel: triton.JITFunction,
        device: torch.device,
        examples: tuple[torch.dtype | int, ...],
        constants: Mapping[str, object],
        *,
        num_warps: int,
    ) -> None:
        self._kernel = kernel
        self._options = {**constants, "num_warps": num_warps}
        self._constants = tuple(constants[name] for name in kernel.arg_names[len(examples) :])
        self._compiled = None
        if not interpreted():
            with torch.cuda.device(device):
                self._compiled = kernel.warmup(*examples, grid=(1,), **self._options)

    def launch(self, num_programs: int, stream: int, *arguments: Tensor | int) -> None:
        """Launches the kernel. Tensors start at multiples of ALIGN_BYTES, except for pointers that the kernel
        does not specialise.

        Args:
            stream: the stream's handle.
        """
        if self._compiled is None:
            self._kernel[(num_programs,)](*arguments, **self._options)
            return
        values = [value if type(value) is int else value.data_ptr() for value in arguments]  # type: ignore[union-attr]
        self._compiled[(num_programs, 1, 1)](*values, *self._constants, stream=stream)


def current_stream(device: torch.device) -> int:
    """The handle of the stream that kernels are launched on; 0 where they are interpreted."""
    return int(driver.active.get_current_stream(device.index)) if device.type == "cuda" else 0


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and not interpreted() and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def await_predecessors(OVERLAP: tl.constexpr):
    """Waits until everything launched before has ended and its writes are visible."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_dependents(OVERLAP: tl.constexpr):
    """Lets the next kernel, if it overlaps, start once all programs have called this. May precede the wait."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(ptrs):
    """Brings the cache lines of these addresses into L2. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0 is not used",
        "=r,l",
        [ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bound(number, INTERPRETED: tl.constexpr):
    """A bound for a loop's `range`: the interpreter's numbers are arrays of one element, which Python cannot count."""
    if INTERPRETED:
        return number.handle.data.item()
    return number
