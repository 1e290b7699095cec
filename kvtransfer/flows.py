"""Divides KV among the links between two nodes' ranks, so that every rank receives its share exactly once. Pure.

Ranks split the kv heads in order; if there are fewer heads than ranks, as with MLA's one latent, neighbouring ranks
hold the same heads. Cells that several ranks of the sender hold are split among them by layers. Each part of a model's
cache has its own heads.

With attention data parallelism each request belongs to one rank, which holds all of its KV. At a receiver, only that
rank's links carry the request, and each carries what it would carry otherwise. At a sender, any rank may own a request,
so every rank is linked with every rank of the receiver.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.kvcache.spec import KVCacheSpec


@dataclass(frozen=True, order=True)
class RankPair:
    """One rank of the sender and one of the receiver."""

    sender_rank: int
    receiver_rank: int


@dataclass(frozen=True)
class Flow:
    """The layers and heads that one link carries, of every token or of every state.

    The layers lie in one part and are numbered over all parts; heads have the model's numbers.
    """

    layers: range
    heads: range


def heads_of(rank: int, *, ranks: int, num_kv_heads: int) -> range:
    """The kv heads that a rank holds.

    Raises:
        ConfigError: neither number is a multiple of the other.
    """
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size is {ranks}, and the model has {num_kv_heads} kv heads",
            field="tensor_parallel_size",
            value=ranks,
            allowed=("a divisor or a multiple of the kv heads",),
        )
    each = max(1, num_kv_heads // ranks)
    first = rank * num_kv_heads // ranks
    return range(first, first + each)


def part_flows(
    spec: KVCacheSpec, *, senders: int, receivers: int, whole_requests: bool = False
) -> Mapping[RankPair, tuple[Flow, ...]]:
    """All links between two nodes with that many ranks, and what each carries of each part. It may carry nothing of
    some parts.

    Args:
        spec: of the whole model.
        whole_requests: each rank of the sender sends requests of its own.

    Raises:
        ConfigError: the ranks cannot split the kv heads, see `heads_of`.
    """
    found: dict[RankPair, tuple[Flow, ...]] = {}
    for part, numbered in zip(spec.parts, spec.part_layers, strict=True):
        if whole_requests:
            each = flows(num_layers=part.num_layers, num_kv_heads=part.num_kv_heads, senders=1, receivers=receivers)
            carried = {
                RankPair(sender, link.receiver_rank): flow for link, flow in each.items() for sender in range(senders)
            }
        else:
            carried = dict(
                flows(num_layers=part.num_layers, num_kv_heads=part.num_kv_heads, senders=senders, receivers=receivers)
            )
        for link, flow in carried.items():
            layers = numbered[flow.layers.start : flow.layers.stop]
            found[link] = (*found.get(link, ()), Flow(layers, flow.heads))
    return found


def flows(*, num_layers: int, num_kv_heads: int, senders: int, receivers: int) -> Mapping[RankPair, Flow]:
    """All links that carry one part between two nodes with that many ranks. The part's layers are numbered from 0.

    Raises:
        ConfigError: the ranks cannot split the kv heads, see `heads_of`.
    """
    found: dict[RankPair, Flow] = {}
    for receiver in range(receivers):
        wanted = heads_of(receiver, ranks=receivers, num_kv_heads=num_kv_heads)
        holders: dict[range, list[int]] = {}
        for sender in range(senders):
            shared = common(wanted, heads_of(sender, ranks=senders, num_kv_heads=num_kv_heads))
            if shared:
                holders.setdefault(shared, []).append(sender)
        for heads, ranks in holders.items():
            for part in range(len(ranks)):
                # Rotated by the receiver's rank, so that the remainder of an uneven division falls on different ranks.
                sender = ranks[(part + receiver) % len(ranks)]
                layers = range(part * num_layers // len(ranks), (part + 1) * num_layers // len(ranks))
                if layers:
                    found[RankPair(sender, receiver)] = Flow(layers, heads)
    return found


def common(one: range, other: range) -> range:
    """The intersection of two ranges, whose steps are 1."""
    return range(max(one.start, other.start), min(one.stop, other.stop))
