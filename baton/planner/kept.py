"""How many tokens of KV a node of a plan keeps outside of its cache, and for how long. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.planner.plan import NodeKind, Plan

_GIB = 1 << 30


@dataclass(frozen=True)
class StoreSizes:
    """Sizes of host memory and files in GiB, of each rank, as nodes' flags give them; 0: none."""

    host_gib: float = 0.0
    file_gib: float = 0.0


@dataclass(frozen=True)
class KeptTokens:
    """What one store of a decode node holds.

    Args:
        tokens: of KV.
        hours: until it is full if no two requests share a prefix; None: the plan serves no rate.
    """

    store: str
    gib: float
    tokens: int
    hours: float | None


def tokens_of(kind: NodeKind, gib: float) -> int:
    """The tokens whose KV fits into stores of this size on each rank of a node; a rank has its share of the heads."""
    return int(gib * _GIB * min(kind.gpus, kind.kv_holders or kind.gpus) / kind.kv_bytes_per_token)


def kept_tokens(plan: Plan, sizes: StoreSizes) -> Iterator[KeptTokens]:
    """What each store of a decode node holds, at the rate that is asked for, or else at the best one."""
    kind, best, rate = plan.question.kind, plan.best, plan.question.rate or plan.best.rate
    tokens_per_s = rate * (plan.demand.prompt + plan.demand.output) / best.spec.decodes
    for store, gib in (("host memory", sizes.host_gib), ("files", sizes.file_gib)):
        if gib and not kind.state_bytes:
            tokens = tokens_of(kind, gib)
            yield KeptTokens(store, gib, tokens, tokens / tokens_per_s / 3600 if tokens_per_s else None)


def kept_lines(plan: Plan, sizes: StoreSizes) -> Iterator[str]:
    """Sentences about the stores; about a GiB of them if none has a size."""
    kind, rate = plan.question.kind, plan.question.rate or plan.best.rate
    if kind.state_bytes:
        yield "the model has recurrent states, so no KV is kept outside of the cache"
        return
    if not sizes.host_gib and not sizes.file_gib:
        one = _thousands(tokens_of(kind, 1.0))
        yield f"a GiB of --host-cache-gib or --file-cache-gib holds {one} more tokens of a node"
    for kept in kept_tokens(plan, sizes):
        line = f"{kept.gib:g} GiB of {kept.store} for each GPU hold {_thousands(kept.tokens)} tokens of a node"
        if kept.hours is not None:
            line += f": {_hours(kept.hours)} of a decode node's part of {rate:.3g} req/s without shared prefixes"
        yield line


def store_flags(sizes: StoreSizes) -> str:
    """The flags of a node with these stores, each after a space."""
    return "".join(f" --{name} {value}" for name, value in _settings(sizes))


def store_variables(sizes: StoreSizes) -> str:
    """The same as variables, each before a space."""
    return "".join(f"BATON_{name.replace('-', '_').upper()}={value} " for name, value in _settings(sizes))


def _settings(sizes: StoreSizes) -> Iterator[tuple[str, str]]:
    if sizes.host_gib:
        yield "host-cache-gib", f"{sizes.host_gib:g}"
    if sizes.file_gib:
        yield "kv-store", "file:///DIRECTORY"
        yield "file-cache-gib", f"{sizes.file_gib:g}"


def _hours(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1e6:.2f}M" if tokens >= 1_000_000 else f"{tokens / 1e3:.0f}k"
