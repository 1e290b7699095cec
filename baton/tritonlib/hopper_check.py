"""Decides whether kernels for Hopper, which are written in Gluon, run on a device.

Gluon is experimental: another version of Triton may reject a kernel, or compile it wrongly. So with an unmeasured
version, each family of kernels is first compared with the portable kernels that it replaces. The verdict holds for the
process and the device. Import the modules of such kernels only after it: with another Triton the import may fail.
"""

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from baton.core.errors import ConfigError

_log = logging.getLogger(__name__)

# The tests and benchmarks for GPUs ran with these versions of Triton on an H200.
MEASURED_VERSIONS = ("3.6.",)
# Results rounded to bfloat16 from sums in another order differ by less; one wrong element in a tile by more.
LARGEST_DIFFERENCE = 2e-2
_DEADLINE_S = 30.0
_POLL_S = 1e-3

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class HopperKernels:
    """A family of kernels that are used together or not at all.

    Attributes:
        name: for logs.
        compare: runs them on small random inputs, and yields each result and that of the portable kernel. It imports
            their modules, and leaves torch's generators as they are.
    """

    name: str
    compare: Callable[[torch.device], Iterable[Pair]]


@dataclass(frozen=True)
class HopperVerdict:
    """The difference between the results of Hopper kernels and portable ones.

    Attributes:
        difference: the largest difference of an element, relative to the largest element; infinite without a
            comparison.
        reason: why there was no comparison.
    """

    difference: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= LARGEST_DIFFERENCE


def probe_of(module: str, function: str = "compare_on_hopper") -> Callable[[torch.device], Iterable[Pair]]:
    """A family's `compare`, whose module is imported only at the call, because it imports the modules that ask for
    it."""

    def compare(device: torch.device) -> Iterable[Pair]:
        pairs: Iterable[Pair] = getattr(importlib.import_module(module), function)(device)
        return pairs

    return compare


def is_hopper(device: torch.device) -> bool:
    """Whether the GPU is one that these kernels are made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def has_hopper_kernels(device: torch.device, kernels: HopperKernels) -> bool:
    """Whether these kernels run on this device. With an unmeasured version of Triton, the first call compares them; it
    must not be within the capture of a CUDA graph.

    Raises:
        ConfigError: a kernel did not end, so nothing runs on this GPU until the process has ended.
    """
    return is_hopper(device) and may_use(kernels, device, version=triton.__version__)


def may_use(kernels: HopperKernels, device: torch.device, *, version: str) -> bool:
    """Whether a Hopper GPU may use these kernels with this version of Triton, which is the one that runs."""
    if version.startswith(MEASURED_VERSIONS):
        return True
    verdict = check(kernels, device)
    _report(kernels, verdict, version)
    return verdict.passed


def check(kernels: HopperKernels, device: torch.device) -> HopperVerdict:
    """Compares the kernels once.

    Raises:
        ConfigError: a kernel did not end.
    """
    largest = 0.0
    try:
        for actual, expected in kernels.compare(device):
            _await(kernels, device)
            largest = max(largest, _difference(actual, expected))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 (an unmeasured compiler may fail in any way)
        return HopperVerdict(math.inf, f"{type(error).__name__}: {error}")
    return HopperVerdict(largest)


def _difference(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(difference.nan_to_num(nan=math.inf))


def _await(kernels: HopperKernels, device: torch.device) -> None:
    """Waits for the kernels up to a deadline, because a wrongly compiled kernel may wait for its own warps for ever."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + _DEADLINE_S
    while not done.query():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the Hopper kernels for {kernels.name} did not end within {_DEADLINE_S:.0f} s",
                field="triton",
                value=triton.__version__,
                allowed=tuple(f"{version}x" for version in MEASURED_VERSIONS),
                cure="install a version of Triton that they were measured with",
            )
        time.sleep(_POLL_S)


def _report(kernels: HopperKernels, verdict: HopperVerdict, version: str) -> None:
    measured = ", ".join(f"{each}x" for each in MEASURED_VERSIONS)
    if verdict.passed:
        _log.info(
            "Triton is %s, and the Hopper kernels for %s were measured with %s: they are used, because their results "
            "differ from the portable kernels' by %.2g at most",
            version,
            kernels.name,
            measured,
            verdict.difference,
        )
        return
    _log.warning(
        "Triton is %s, and the Hopper kernels for %s were measured with %s: slower portable kernels take their place, "
        "because %s",
        version,
        kernels.name,
        measured,
        verdict.reason or f"their results differ by {verdict.difference:.2g}, and {LARGEST_DIFFERENCE:.2g} is allowed",
    )
