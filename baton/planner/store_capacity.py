"""Computes how many tokens of KV fit into the host memory and files of a plan's nodes, and for how long. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.pull_costs import ASSUMED_LOAD_BYTES_PER_S
from baton.planner.plan import Plan


@dataclass(frozen=True)
class StoreSizes:
    """Sizes of host memory and files in GiB, of each rank, as nodes' flags give them; 0: none."""

    host_gib: float = 0.0
    file_gib: float = 0.0


@dataclass(frozen=True)
class StoreCapacity:
    """The capacity of one store of a decode node.

    Args:
        tokens: of KV.
        hours: until it is full if no two requests share a prefix; None: the plan serves no rate.
    """

    store: str
    gib: float
    tokens: int
    hours: float | None


def store_capacities(plan: Plan, sizes: StoreSizes) -> Iterator[StoreCapacity]:
    """The capacity of each store of a decode node, at the requested rate, or otherwise at the best one."""
    best, rate = plan.best, plan.question.rate or plan.best.rate
    request_tokens = plan.demand.prompt + plan.demand.output
    tokens_per_s = rate * request_tokens / best.spec.decodes
    for store, gib in (("host memory", sizes.host_gib), ("files", sizes.file_gib)):
        if gib:
            tokens = plan.question.kind.tokens_in(gib, request_tokens=request_tokens)
            yield StoreCapacity(store, gib, tokens, tokens / tokens_per_s / 3600 if tokens_per_s else None)


def capacity_lines(plan: Plan, sizes: StoreSizes) -> Iterator[str]:
    """Sentences about the stores; what one GiB would hold if none has a size."""
    rate = plan.question.rate or plan.best.rate
    if not sizes.host_gib and not sizes.file_gib:
        request_tokens = plan.demand.prompt + plan.demand.output
        one = _thousands(plan.question.kind.tokens_in(1.0, request_tokens=request_tokens))
        yield f"a GiB of --host-cache-gib or --file-cache-gib holds {one} more tokens of a node"
    for capacity in store_capacities(plan, sizes):
        line = (
            f"{capacity.gib:g} GiB of {capacity.store} for each GPU hold {_thousands(capacity.tokens)} tokens of a node"
        )
        if capacity.hours is not None:
            line += f": {_hours(capacity.hours)} of a decode node's part of {rate:.3g} req/s without shared prefixes"
        yield line
    if sizes.host_gib and plan.question.kind.state_bytes:
        yield "simulated without host memory, because the model has recurrent states"
    elif sizes.host_gib:
        costs = plan.question.pull_costs
        load = f"loads from host memory at {ASSUMED_LOAD_BYTES_PER_S / 1e9:g} GB/s"
        pull = f"pulls from other nodes of {1e3 * costs.fixed_s:g} ms and {1e-9 / costs.byte_s:g} GB/s"
        yield f"simulated with {load} and {pull} (--pull-ms, --pull-gb-per-s), without files"


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
        yield "file-cache-dir", "DIRECTORY"
        yield "file-cache-gib", f"{sizes.file_gib:g}"


def _hours(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1e6:.2f}M" if tokens >= 1_000_000 else f"{tokens / 1e3:.0f}k"
