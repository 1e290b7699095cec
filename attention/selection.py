"""Selects the backend that serves a model on a node, from one explicit table in order of preference.

Other distributions register a `BackendClass` by an entry point of the group `baton.attention_backends`; theirs come
last.

It reads no environment and probes no device: it maps needs and platform to a backend or to reasons. Importing it
imports none of the optional packages; a backend whose package is missing is refused like any other that does not fit.
"""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from attention.backend import AttentionBackend, AttentionNeeds, BackendCapabilities
from attention.backends.blocksparse import BlocksparseFlashAttention
from attention.backends.flash_attn import FlashAttention
from attention.backends.flashinfer import FlashInfer
from attention.backends.flashinfer_mla import FlashInferMLA
from attention.backends.torch_mla import TorchMLA
from attention.backends.torch_sdpa import TorchSDPA
from attention.backends.triton_attn import TritonAttention
from attention.backends.triton_mla import TritonMLA
from attention.backends.xformers import XFormers
from attention.parameters import get_per_layer_parameters, infer_global_hyperparameters
from attention.platform import Platform, probe_platform
from baton.core import plugins
from baton.core.errors import ConfigError


class BackendClass(Protocol):
    """A backend's capabilities and constructor. The constructor runs only if there is no reason against the backend."""

    capabilities: BackendCapabilities

    def __call__(
        self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int
    ) -> AttentionBackend: ...


# Plain torch serves CPUs only, and is preferred there: kernels run there only in Triton's interpreter. On an H200
# TRITON_ATTN decodes within 4 % of the best backend at every size of the benchmark, and prefills at 513 to 662
# TFLOPS, within 12 % at many short prompts and 4 % else; for 64 heads and more FLASHINFER_MLA decodes 1.05 to 1.31
# times as fast as TRITON_MLA, and prefills with the same kernel.
BACKENDS: tuple[BackendClass, ...] = (
    TorchSDPA,
    TorchMLA,
    TritonAttention,
    FlashInferMLA,
    FlashInfer,
    TritonMLA,
    BlocksparseFlashAttention,
    FlashAttention,
    XFormers,
)
# With at most this many heads, on Hopper, whole decode steps take 0.86 to 1.02 times as long with TRITON_MLA as with
# FLASHINFER_MLA (DeepSeek-V2-Lite on an H200, 1 to 256 rows): every step of the latter waits for the host's plan, which
# also costs the host 0.2 to 0.4 ms.
_FEW_HEADS = 32
DEFAULT_CONTEXT_WORKSPACE_TOKENS = 4096
# Earlier GPUs cannot convert e4m3, and Triton refuses to compile for them.
_E4M3_COMPUTE_CAPABILITY = (8, 9)

_log = logging.getLogger(__name__)


def select_backend(
    needs: AttentionNeeds,
    *,
    platform: Platform | None = None,
    forced: str | None = None,
    context_workspace_tokens: int = DEFAULT_CONTEXT_WORKSPACE_TOKENS,
) -> AttentionBackend:
    """Returns the first backend in order of preference that meets the needs, or the forced backend if it meets them.

    Args:
        platform: None probes this machine.
        forced: a backend's name; case does not matter.
        context_workspace_tokens: number of context tokens that MLA decompresses at once.

    Raises:
        ConfigError: there is no such backend, or none meets the needs; it lists every backend with every reason against
            it.
    """
    platform = platform or probe_platform(needs.device)
    chosen = _choose(reasons := _reasons(needs, platform), forced, needs)
    _log.info("attention backend %s, %s", chosen, _how(forced=forced is not None))
    _log.debug("%s", _report(reasons, chosen, forced=forced is not None))
    backend = next(backend for backend in all_backends() if backend.capabilities.name == chosen)
    return backend(needs, platform, context_workspace_tokens=context_workspace_tokens)


def selection_report(needs: AttentionNeeds, platform: Platform, *, forced: str | None = None) -> str:
    """Returns one line per backend: chosen, fitting but not preferred, or every reason against it. Library API.

    Raises:
        ConfigError: as `select_backend`.
    """
    reasons = _reasons(needs, platform)
    return _report(reasons, _choose(reasons, forced, needs), forced=forced is not None)


def fitting_backends(needs: AttentionNeeds, platform: Platform) -> list[BackendClass]:
    """Returns the backends that meet the needs, the preferred one first. Library API."""
    return [each for each in _by_preference(needs, platform) if not reasons_against(each.capabilities, needs, platform)]


def _by_preference(needs: AttentionNeeds, platform: Platform) -> list[BackendClass]:
    """Returns the table in the best order for this model on this platform."""
    last = (FlashInferMLA,) if platform.hopper_kernels and needs.num_heads <= _FEW_HEADS else ()
    return sorted(all_backends(), key=lambda backend: backend in last)


def all_backends() -> tuple[BackendClass, ...]:
    """Returns the table, then the plug-ins by name.

    Raises:
        ConfigError: a plug-in cannot be loaded, is no backend, or has a name that is taken.
    """
    taken = [backend.capabilities.name for backend in BACKENDS]
    found: dict[str, Any] = plugins.load_plugins(plugins.ATTENTION_BACKENDS, taken)
    for name, backend in found.items():
        named = getattr(getattr(backend, "capabilities", None), "name", None)
        if named != name:
            raise ConfigError(
                f"the entry point {name!r} of {plugins.ATTENTION_BACKENDS} has capabilities named {named!r}",
                field=plugins.ATTENTION_BACKENDS,
                value=name,
                cure="give both the same name, in capital letters",
            )
    return (*BACKENDS, *found.values())


def _reasons(needs: AttentionNeeds, platform: Platform) -> dict[str, tuple[str, ...]]:
    backends = _by_preference(needs, platform)
    return {backend.capabilities.name: reasons_against(backend.capabilities, needs, platform) for backend in backends}


def _choose(reasons: Mapping[str, tuple[str, ...]], forced: str | None, needs: AttentionNeeds) -> str:
    wanted = None if forced is None else forced.strip().upper()
    if wanted is not None and wanted not in reasons:
        raise ConfigError(
            f"BATON_ATTENTION_BACKEND (--attention-backend) is {forced!r}",
            field="attention_backend",
            value=forced,
            allowed=tuple(reasons),
        )
    fitting = tuple(name for name, against in reasons.items() if not against)
    chosen = [name for name in fitting if wanted in (None, name)]
    if chosen:
        return chosen[0]
    raise ConfigError(
        f"{wanted or 'no attention backend'} {'does not serve' if wanted else 'serves'} this model here: "
        + " | ".join(f"{name}: {'; '.join(against) or 'meets the needs'}" for name, against in reasons.items()),
        field="attention_backend",
        value=forced or "",
        allowed=fitting,
        cure=_cure(needs, forced=wanted is not None),
    )


def _cure(needs: AttentionNeeds, *, forced: bool) -> str:
    cure = "change what the reasons name"
    if forced:
        cure += ", or unset BATON_ATTENTION_BACKEND"
    if needs.batch_invariant:
        able = [each.capabilities for each in BACKENDS if each.capabilities.rows_in_order]
        names = " and ".join(each.name for each in able if each.kind is needs.kind)
        cure += f"; --batch-invariant needs a backend with rows_in_order ({names}), and others may serve without it"
    return cure


def _how(*, forced: bool) -> str:
    return "forced" if forced else "the first that fits"


def _report(reasons: Mapping[str, tuple[str, ...]], chosen: str, *, forced: bool) -> str:
    lines = [f"attention backend {chosen}, {_how(forced=forced)}:"]
    for name, against in reasons.items():
        verdict = "; ".join(against) or ("chosen" if name == chosen else "fits")
        lines.append(f"  {name}: {verdict}")
    return "\n".join(lines)


def reasons_against(capabilities: BackendCapabilities, needs: AttentionNeeds, platform: Platform) -> tuple[str, ...]:
    """Returns every reason why a backend does not meet the needs on this platform; () if it does."""
    reasons = []
    if needs.kind is not capabilities.kind:
        reasons.append(f"kind {needs.kind} is not {capabilities.kind}")
    for field, value, supported in (
        ("device", _device_type(needs, capabilities, platform), capabilities.devices),
        ("dtype", needs.dtype, capabilities.dtypes),
        ("kv_dtype", needs.cache_dtype, capabilities.kv_dtypes),
        ("head_size", needs.head_size, capabilities.head_sizes),
        ("block_size", needs.block_size, capabilities.block_sizes),
        ("layout", needs.layout.name, frozenset(layout.name for layout in capabilities.layouts)),
    ):
        if supported is not None and value not in supported:
            reasons.append(f"{field} {value} is not among {', '.join(str(item) for item in sorted(supported))}")
    missing = sorted(needs.features - capabilities.features)
    if missing:
        reasons.append(f"no {', '.join(missing)}")
    minimum = capabilities.min_compute_capability
    if needs.cache_dtype == "float8_e4m3fn" and minimum is not None:
        minimum = max(minimum, _E4M3_COMPUTE_CAPABILITY)
    if minimum is not None and platform.compute_capability is not None and platform.compute_capability < minimum:
        has, wants = (".".join(map(str, version)) for version in (platform.compute_capability, minimum))
        reasons.append(f"the GPU's compute capability is {has}, below {wants}")
    if capabilities.package is not None and capabilities.package not in platform.packages:
        reasons.append(f"package {capabilities.package} is not installed: {capabilities.install}")
    if needs.batch_invariant and not capabilities.batch_invariant:
        reasons.append("its results depend on the batch")
    elif needs.batch_invariant and not capabilities.rows_in_order:
        reasons.append("no rows_in_order: a token's bits depend on how its prompt is cut into chunks")
    if capabilities.reasons_against_plans is not None and needs.kind is capabilities.kind:
        reasons.extend(capabilities.reasons_against_plans(needs, platform))
    if capabilities.uniform_layers and needs.layers:
        try:
            infer_global_hyperparameters(get_per_layer_parameters(needs.layers))
        except ConfigError as error:
            reasons.append(error.message)
    return tuple(reasons)


def _device_type(needs: AttentionNeeds, capabilities: BackendCapabilities, platform: Platform) -> str:
    """Returns the device type that the backend must support. Triton's interpreter runs GPU kernels on CPU tensors."""
    device_type = torch.device(needs.device).type
    if platform.triton_interpreted and capabilities.package is None and "cpu" not in capabilities.devices:
        return "cuda"
    return device_type
