"""Which backend serves a model on a node: one explicit table, in order of preference.

Reads no environment and probes no device: the needs come in, the reasons go out.
"""

from attention.backend import AttentionBackend, AttentionNeeds, BackendCapabilities
from attention.backends.torch_mla import TorchMLA
from attention.backends.torch_sdpa import TorchSDPA
from baton.errors import ConfigError

BACKENDS: tuple[type[TorchSDPA] | type[TorchMLA], ...] = (TorchSDPA, TorchMLA)
DEFAULT_CONTEXT_WORKSPACE_TOKENS = 4096


def select_backend(
    needs: AttentionNeeds,
    *,
    forced: str | None = None,
    context_workspace_tokens: int = DEFAULT_CONTEXT_WORKSPACE_TOKENS,
) -> AttentionBackend:
    """The first backend of the table that meets the needs, or the forced one if it does.

    Args:
        forced: a backend's name; case does not matter.
        context_workspace_tokens: how much of a prefill's context MLA decompresses at once.

    Raises:
        ConfigError: no such backend, or none that meets the needs; lists every backend with every reason against it.
    """
    wanted = None if forced is None else forced.strip().upper()
    names = tuple(backend.capabilities.name for backend in BACKENDS)
    if wanted is not None and wanted not in names:
        raise ConfigError(
            f"BATON_ATTENTION_BACKEND (--attention-backend) is {forced!r}",
            field="attention_backend",
            value=forced,
            allowed=names,
        )
    for backend in BACKENDS:
        if wanted in (None, backend.capabilities.name) and not reasons_against(backend.capabilities, needs):
            return backend(needs, context_workspace_tokens=context_workspace_tokens)
    raise ConfigError(
        f"{wanted or 'no attention backend'} {'does not serve' if wanted else 'serves'} this model here: "
        + " | ".join(_describe(backend.capabilities, needs) for backend in BACKENDS),
        field="attention_backend",
        value=forced or "",
        allowed=tuple(
            name
            for name, backend in zip(names, BACKENDS, strict=True)
            if not reasons_against(backend.capabilities, needs)
        ),
        cure="change what the reasons name, or unset BATON_ATTENTION_BACKEND"
        if wanted
        else "change what the reasons name",
    )


def reasons_against(capabilities: BackendCapabilities, needs: AttentionNeeds) -> tuple[str, ...]:
    """Everything that keeps a backend from meeting the needs; () if nothing does."""
    reasons = []
    if needs.kind is not capabilities.kind:
        reasons.append(f"kind {needs.kind} is not {capabilities.kind}")
    for field, value, supported in (
        ("device", needs.device, capabilities.devices),
        ("dtype", needs.dtype, capabilities.dtypes),
        ("head_size", needs.head_size, capabilities.head_sizes),
        ("block_size", needs.block_size, capabilities.block_sizes),
        ("layout", needs.layout.name, frozenset(layout.name for layout in capabilities.layouts)),
    ):
        if supported is not None and value not in supported:
            reasons.append(f"{field} {value} is not among {', '.join(str(item) for item in sorted(supported))}")
    missing = sorted(needs.features - capabilities.features)
    if missing:
        reasons.append(f"no {', '.join(missing)}")
    return tuple(reasons)


def _describe(capabilities: BackendCapabilities, needs: AttentionNeeds) -> str:
    return f"{capabilities.name}: {'; '.join(reasons_against(capabilities, needs)) or 'meets the needs'}"
