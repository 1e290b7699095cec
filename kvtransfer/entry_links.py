"""The links over which one node sends entries to another, and the parts that each carries. Pure; no torch.

Ranks that keep the same part of an entry exchange it whole. Others send the flows of their link: some heads, or some
layers. A recurrent state is kept in pieces, whose bounds differ if the nodes' ranks do. So its flows are cut at the
bounds of both: each lies in one piece of the owner and in one piece of the reader.
"""

from collections.abc import Iterator, Mapping, Sequence

from baton.core.kv_entries import NodeRanks
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.flows import Flow, RankPair, common, heads_of, part_flows
from kvtransfer.parts import parts_of
from kvtransfer.stores.entry import EntryLayout, EntryMessage


def entry_links(spec: KVCacheSpec, *, owner: NodeRanks, reader: NodeRanks) -> Mapping[RankPair, tuple[Flow, ...]]:
    """The links from one node to another, and what each carries of an entry and of a state. No flows: all of both,
    because both ranks keep the same.

    Args:
        spec: of the whole model.

    Raises:
        ConfigError: the ranks cannot split the kv heads, see `heads_of`.
    """
    if owner.size == reader.size and not owner.own_requests:
        return {RankPair(rank, rank): () for rank in range(owner.size)}
    carried = part_flows(spec, senders=owner.size, receivers=reader.size, whole_requests=owner.own_requests)
    found: dict[RankPair, tuple[Flow, ...]] = {}
    for link, flows in carried.items():
        ours, theirs = _held(spec, link.sender_rank, owner.size), _held(spec, link.receiver_rank, reader.size)
        found[link] = () if flows == ours == theirs else tuple(_cut(flows, spec, ours, theirs))
    return found


def _held(spec: KVCacheSpec, rank: int, ranks: int) -> tuple[Flow, ...]:
    """What a rank keeps of each part."""
    return tuple(
        Flow(layers, heads_of(rank, ranks=ranks, num_kv_heads=part.num_kv_heads))
        for part, layers in zip(spec.parts, spec.part_layers, strict=True)
    )


def _cut(flows: Sequence[Flow], spec: KVCacheSpec, ours: Sequence[Flow], theirs: Sequence[Flow]) -> Iterator[Flow]:
    """The flows of a link, those of a state cut at the pieces of both ranks."""
    states = [layers for part, layers in zip(spec.parts, spec.part_layers, strict=True) if part.kind is KVKind.STATE]
    for flow in flows:
        if not any(common(flow.layers, layers) for layers in states):
            yield flow
            continue
        for piece in _pieces(spec, ours):
            for other in _pieces(spec, theirs):
                layers = common(flow.layers, common(piece.layers, other.layers))
                heads = common(flow.heads, common(piece.heads, other.heads))
                if layers and heads:
                    yield Flow(layers, heads)


def _pieces(spec: KVCacheSpec, held: Sequence[Flow]) -> tuple[EntryMessage, ...]:
    return EntryLayout(parts_of(spec, [flow.heads for flow in held])).pieces
