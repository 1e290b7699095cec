"""Which backend serves a model on a node: one explicit table, in order of preference.

Reads no environment and probes no device: needs and platform come in, the reasons go out.
"""

from typing import Protocol

import torch

from attention.backend import AttentionBackend, AttentionNeeds, BackendCapabilities
from attention.backends.torch_mla import TorchMLA
from attention.backends.torch_sdpa import TorchSDPA
from attention.parameters import get_per_layer_parameters, infer_global_hyperparameters
from attention.platform import Platform, probe_platform
from baton.errors import ConfigError


class BackendClass(Protocol):
    """How a backend is made; its constructor is called only when nothing speaks against it."""

    capabilities: BackendCapabilities

    def __call__(
        self, needs: AttentionNeeds, platform: Platform, *, context_workspace_tokens: int
    ) -> AttentionBackend: ...


BACKENDS: tuple[BackendClass, ...] = (TorchSDPA, TorchMLA)
DEFAULT_CONTEXT_WORKSPACE_TOKENS = 4096


def select_backend(
    needs: AttentionNeeds,
    *,
    platform: Platform | None = None,
    forced: str | None = None,
    context_workspace_tokens: int = DEFAULT_CONTEXT_WORKSPACE_TOKENS,
) -> AttentionBackend:
    """The first backend of the table that meets the needs, or the forced one if it does.

    Args:
        platform: None asks the machine that this runs on.
        forced: a backend's name; case does not matter.
        context_workspace_tokens: how much of a prefill's context MLA decompresses at once.

    Raises:
        ConfigError: no such backend, or none that meets the needs; lists every backend with every reason against it.
    """
    platform = platform or probe_platform(needs.device)
    wanted = None if forced is None else forced.strip().upper()
    names = tuple(backend.capabilities.name for backend in BACKENDS)
    if wanted is not None and wanted not in names:
        raise ConfigError(
            f"BATON_ATTENTION_BACKEND (--attention-backend) is {forced!r}",
            field="attention_backend",
            value=forced,
            allowed=names,
        )
    reasons = {
        backend.capabilities.name: reasons_against(backend.capabilities, needs, platform) for backend in BACKENDS
    }
    for backend in BACKENDS:
        if wanted in (None, backend.capabilities.name) and not reasons[backend.capabilities.name]:
            return backend(needs, platform, context_workspace_tokens=context_workspace_tokens)
    raise ConfigError(
        f"{wanted or 'no attention backend'} {'does not serve' if wanted else 'serves'} this model here: "
        + " | ".join(f"{name}: {'; '.join(against) or 'meets the needs'}" for name, against in reasons.items()),
        field="attention_backend",
        value=forced or "",
        allowed=tuple(name for name, against in reasons.items() if not against),
        cure="change what the reasons name, or unset BATON_ATTENTION_BACKEND"
        if wanted
        else "change what the reasons name",
    )


def reasons_against(capabilities: BackendCapabilities, needs: AttentionNeeds, platform: Platform) -> tuple[str, ...]:
    """Everything that keeps a backend from meeting the needs on this platform; () if nothing does."""
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
    if minimum is not None and platform.compute_capability is not None and platform.compute_capability < minimum:
        has, wants = (".".join(map(str, version)) for version in (platform.compute_capability, minimum))
        reasons.append(f"the GPU's compute capability is {has}, below {wants}")
    if capabilities.package is not None and capabilities.package not in platform.packages:
        reasons.append(f"package {capabilities.package} is not installed: {capabilities.install}")
    if capabilities.uniform_layers and needs.layers:
        try:
            infer_global_hyperparameters(get_per_layer_parameters(needs.layers))
        except ConfigError as error:
            reasons.append(error.message)
    return tuple(reasons)


def _device_type(needs: AttentionNeeds, capabilities: BackendCapabilities, platform: Platform) -> str:
    """Triton's interpreter runs what is for a GPU on CPU tensors."""
    device_type = torch.device(needs.device).type
    if platform.triton_interpreted and capabilities.package is None and "cpu" not in capabilities.devices:
        return "cuda"
    return device_type
