"""Conversion between a node's plain values and protocol messages, in both directions. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from baton.core.costs import StepCosts
from baton.core.errors import PeerRefused
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import node_status_pb2 as pb
from baton.rpc.convert_node import costs_to_proto
from kvtransfer.flows import RankPair
from kvtransfer.plan import Mismatch, NodeDescription
from kvtransfer.records import LinkMeasure, WarmUp

_KINDS = {KVKind.GQA: pb.KV_KIND_GQA, KVKind.MLA: pb.KV_KIND_MLA, KVKind.STATE: pb.KV_KIND_STATE}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


def to_info(
    description: NodeDescription,
    *,
    name: str,
    address: str,
    role: pb.Role.ValueType,
    incarnation: int,
    model_name: str,
    revision_name: str = "",
    vocabulary_digest: str = "",
    max_context_tokens: int,
    model_context_tokens: int = 0,
    cache_identity: str = "",
    also_decodes: bool = False,
    topology: Sequence[str] = (),
) -> pb.NodeInfo:
    """A node's description for its peers and gateways."""
    spec, shape = description.spec, description.shape
    return pb.NodeInfo(
        name=name,
        address=address,
        role=role,
        incarnation=incarnation,
        package_version=description.package_version,
        model=pb.ModelIdentity(
            architecture=description.architecture,
            config_digest=description.config_digest,
            weights_digest=description.weights_digest,
            content_digest=description.content_digest,
            name=model_name,
            revision_name=revision_name,
            vocabulary_digest=vocabulary_digest,
        ),
        cache_spec=_from_spec(spec),
        cache_shape=pb.CacheShape(
            layout=shape.layout.name,
            block_size=shape.block_size,
            num_blocks=shape.num_blocks,
            state_slots=shape.state_slots,
        ),
        wire=pb.WireVersions(oldest=description.wire_oldest, newest=description.wire_newest),
        max_context_tokens=max_context_tokens,
        model_context_tokens=model_context_tokens,
        batch_invariant=description.batch_invariant,
        tensor_parallel_size=description.tensor_parallel_size,
        converted_kv_dtypes=description.converted_kv_dtypes,
        cache_identity=cache_identity,
        also_decodes=also_decodes,
        attention_data_parallel=description.attention_data_parallel,
        draft_digest=description.draft_digest,
        rows_in_order=description.rows_in_order,
        expert_parallel=description.expert_parallel,
        topology=topology,
    )


def from_info(info: pb.NodeInfo) -> NodeDescription:
    """A peer's description, for `agree`.

    Raises:
        ConfigError: the peer's cache has an impossible size or layout.
        PeerRefused: the peer's cache has a layout or kind that this version does not know.
    """
    spec, shape = info.cache_spec, info.cache_shape
    if not _is_known(spec) or shape.layout not in KVCacheLayout.__members__:
        what = f"KV of kind {spec.kind} in layout {shape.layout!r}"
        message = f"{info.name} has {what}, which this version does not know"
        raise PeerRefused(message, cure="use the same version on both nodes")
    return NodeDescription(
        architecture=info.model.architecture,
        config_digest=info.model.config_digest,
        weights_digest=info.model.weights_digest,
        content_digest=info.model.content_digest,
        spec=_to_spec(spec),
        shape=KVCacheShape(KVCacheLayout[shape.layout], shape.block_size, shape.num_blocks, shape.state_slots),
        wire_oldest=info.wire.oldest,
        wire_newest=info.wire.newest,
        package_version=info.package_version,
        batch_invariant=info.batch_invariant,
        tensor_parallel_size=info.tensor_parallel_size or 1,
        converted_kv_dtypes=tuple(info.converted_kv_dtypes),
        attention_data_parallel=info.attention_data_parallel,
        draft_digest=info.draft_digest,
        rows_in_order=info.rows_in_order,
        expert_parallel=info.expert_parallel,
    )


def _from_spec(spec: KVCacheSpec) -> pb.CacheSpec:
    return pb.CacheSpec(
        kind=_KINDS[spec.kind],
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        windows=spec.windows,
        index=None if spec.index is None else _from_spec(spec.index),
        state=None if spec.state is None else _from_spec(spec.state),
        draft=None if spec.draft is None else _from_spec(spec.draft),
    )


def _is_known(spec: pb.CacheSpec) -> bool:
    """Whether this version knows the kind of every part of the cache."""
    return (
        spec.kind in (pb.KV_KIND_GQA, pb.KV_KIND_MLA)
        and (not spec.HasField("index") or spec.index.kind == pb.KV_KIND_MLA)
        and (not spec.HasField("state") or spec.state.kind == pb.KV_KIND_STATE)
        and (not spec.HasField("draft") or spec.draft.kind in (pb.KV_KIND_GQA, pb.KV_KIND_MLA))
        and (not spec.draft.HasField("index") or spec.draft.index.kind == pb.KV_KIND_MLA)
    )


def _to_spec(spec: pb.CacheSpec) -> KVCacheSpec:
    return replace(
        _to_part(spec),
        index=_to_part(spec.index) if spec.HasField("index") else None,
        state=_to_part(spec.state) if spec.HasField("state") else None,
        draft=_to_draft(spec.draft) if spec.HasField("draft") else None,
    )


def _to_draft(spec: pb.CacheSpec) -> KVCacheSpec:
    """The spec of layers that draft tokens, which has no further part but an index."""
    return replace(_to_part(spec), index=_to_part(spec.index) if spec.HasField("index") else None)


def _to_part(spec: pb.CacheSpec) -> KVCacheSpec:
    """The spec without further parts."""
    return KVCacheSpec(
        kind=_KINDS_BACK[spec.kind],
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        windows=tuple(spec.windows),
    )


def to_step_costs(costs: StepCosts | None) -> pb.StepCosts | None:
    """The costs for a status. Returns None, which leaves the status without costs, while they are unknown."""
    return None if costs is None else costs_to_proto(costs)


def from_addresses(addresses: Mapping[RankPair, bytes]) -> list[decode_pb2.WorkerAddress]:
    return [
        decode_pb2.WorkerAddress(sender_rank=link.sender_rank, receiver_rank=link.receiver_rank, address=address)
        for link, address in addresses.items()
    ]


def to_addresses(addresses: Iterable[decode_pb2.WorkerAddress]) -> dict[RankPair, bytes]:
    return {RankPair(item.sender_rank, item.receiver_rank): item.address for item in addresses}


def from_warm_ups(sent: Mapping[RankPair, WarmUp]) -> decode_pb2.WarmedUp:
    return decode_pb2.WarmedUp(
        links=[
            decode_pb2.LinkWarmUp(
                sender_rank=link.sender_rank,
                receiver_rank=link.receiver_rank,
                messages=warm.messages,
                bytes=warm.bytes,
            )
            for link, warm in sent.items()
        ]
    )


def to_warm_ups(warmed_up: decode_pb2.WarmedUp) -> dict[RankPair, WarmUp]:
    return {
        RankPair(item.sender_rank, item.receiver_rank): WarmUp(item.messages, item.bytes) for item in warmed_up.links
    }


def from_measure(measure: LinkMeasure) -> decode_pb2.PairReady:
    return decode_pb2.PairReady(
        transport=measure.transport,
        gigabytes_per_s=measure.gigabytes_per_s,
        latency_s=measure.latency_s,
        message_cost_s=measure.message_cost_s,
    )


def to_measure(ready: decode_pb2.PairReady) -> LinkMeasure:
    return LinkMeasure(ready.transport, ready.gigabytes_per_s, ready.latency_s, ready.message_cost_s)


def describe_measure(measure: LinkMeasure) -> str:
    """A measured link in words, for logs."""
    times = f"{measure.latency_s * 1e6:.0f} us one way, {measure.message_cost_s * 1e6:.0f} us for one more message"
    return f"{measure.transport} at {measure.gigabytes_per_s:.1f} GB/s, {times}"


def describe_conversion(kv_converted: str) -> str:
    """The end of a log line about a link; empty if KV keeps its dtype."""
    return f"; KV is converted in transit, {kv_converted}" if kv_converted else ""


def to_mismatches(mismatches: tuple[Mismatch, ...]) -> list[pb.Mismatch]:
    return [pb.Mismatch(field=item.field, ours=item.ours, theirs=item.theirs, cure=item.cure) for item in mismatches]


def describe_mismatches(mismatches: list[pb.Mismatch]) -> str:
    """Every mismatch in one line, for logs."""
    return "; ".join(f"{item.field}: ours {item.ours}, theirs {item.theirs} ({item.cure})" for item in mismatches)
