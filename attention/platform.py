"""Facts about the machine that decide which attention backends it supports. They are probed once, when a node is
built."""

import importlib.util
from dataclasses import dataclass

import torch
import triton

from baton.tritonlib.hopper_check import is_hopper

# Packages that some backends need, by import name.
OPTIONAL_PACKAGES = ("flash_attn", "flashinfer", "xformers")


@dataclass(frozen=True)
class Platform:
    """The device that attention runs on, and the packages installed for it.

    Attributes:
        device_type: "cpu" or "cuda".
        compute_capability: of the GPU, such as (9, 0); None without one.
        num_sms: multiprocessors of the GPU; 1 without one.
        packages: the optional packages that are installed.
        triton_interpreted: Triton kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1): for tests.
        hopper_kernels: our Hopper kernels support the GPU. Each family of kernels also needs a version of Triton that
            compiles it correctly (`baton.tritonlib.hopper_check`); otherwise portable kernels run its calls.
    """

    device_type: str
    compute_capability: tuple[int, int] | None = None
    num_sms: int = 1
    packages: frozenset[str] = frozenset()
    triton_interpreted: bool = False
    hopper_kernels: bool = False


def probe_platform(device: torch.device | str) -> Platform:
    """Probes the GPU, the installed packages and Triton without importing any optional package."""
    device = torch.device(device)
    packages = frozenset(name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is not None)
    interpreted = bool(triton.knobs.runtime.interpret)
    if device.type != "cuda":
        return Platform(device.type, packages=packages, triton_interpreted=interpreted)
    properties = torch.cuda.get_device_properties(device)
    return Platform(
        device_type="cuda",
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        packages=packages,
        triton_interpreted=interpreted,
        hopper_kernels=is_hopper(device),
    )
