"""Which backends the conformance tests of this machine cover: all that its platform offers, in every table row.

On a CPU Triton's backends run in the interpreter. A backend whose package is not installed here is tested where it is.
"""

from attention.backend import AttentionNeeds, BackendCapabilities
from attention.platform import probe_platform
from attention.selection import BackendClass, all_backends, reasons_against
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import DTYPE_BYTES, KVKind
from tests.device import DEVICE

PLATFORM = probe_platform(DEVICE)
# Everything that no platform could change.
_ALWAYS = ("kind", "dtype", "kv_dtype", "head_size", "block_size", "layout", "no ")


def backends_here(kind: KVKind) -> tuple[BackendClass, ...]:
    return tuple(
        backend for backend in all_backends() if backend.capabilities.kind is kind and _runs_here(backend.capabilities)
    )


def _runs_here(capabilities: BackendCapabilities) -> bool:
    needs = AttentionNeeds(
        kind=capabilities.kind,
        device=DEVICE,
        dtype="bfloat16",
        head_size=64,
        block_size=64,
        layout=KVCacheLayout.NHD,
    )
    reasons = reasons_against(capabilities, needs, PLATFORM)
    return all(reason.startswith(_ALWAYS) for reason in reasons)


def dtypes_here(capabilities: BackendCapabilities) -> tuple[str, ...]:
    return tuple(dtype for dtype in DTYPE_BYTES if dtype in capabilities.dtypes)


def main_dtype(capabilities: BackendCapabilities) -> str:
    """Where one dtype stands for all: on a GPU what models run in, because its kernels are others than float32's."""
    return "bfloat16" if DEVICE == "cuda" and "bfloat16" in capabilities.dtypes else dtypes_here(capabilities)[0]


def backend_name(value: object) -> str:
    """For test ids."""
    capabilities = getattr(value, "capabilities", None)
    assert isinstance(capabilities, BackendCapabilities)
    return capabilities.name
