"""Converts the messages in which nodes describe themselves: step costs, load of experts, loading, size of the cache.
Also converts what requests say about kept KV, for how long and where it is, and checks their times."""

import math
from itertools import pairwise

from baton.core.costs import StepCosts
from baton.core.errors import InvalidRequest, shortened
from baton.core.expert_load import ExpertLoad, LayerLoad
from baton.core.kv_entries import KEEP_S_MAX, KeepTime, KeptPrefix, NodeRanks
from baton.protos.internal.v1 import decode_pb2, lease_pb2, node_pb2, prefill_pb2
from baton.protos.v1 import node_status_pb2
from baton.protos.v1 import node_status_pb2 as pb

_TEXT_MAX = 200
_DTYPE_BYTES = {"float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


def expert_load_to_proto(load: ExpertLoad) -> node_pb2.GetExpertLoadResponse:
    layers = (
        node_pb2.ExpertLayerLoad(layer=each.layer, tokens=each.tokens, rank_tokens=each.rank_tokens)
        for each in load.layers
    )
    return node_pb2.GetExpertLoadResponse(
        model=load.model, redundant_experts=load.redundant_experts, layers=list(layers)
    )


def expert_load_from_proto(message: node_pb2.GetExpertLoadResponse) -> ExpertLoad:
    layers = (
        LayerLoad(layer=each.layer, tokens=tuple(each.tokens), rank_tokens=tuple(each.rank_tokens))
        for each in message.layers
    )
    return ExpertLoad(model=message.model, redundant_experts=message.redundant_experts, layers=tuple(layers))


def costs_to_proto(costs: StepCosts) -> pb.StepCosts:
    return pb.StepCosts(
        points=[pb.TokensCost(tokens=tokens, seconds=seconds) for tokens, seconds in costs.points],
        key_s=costs.key_s,
        pair_s=costs.pair_s,
        decode_row_s=costs.decode_row_s,
        prompt_step_s=costs.prompt_step_s,
    )


def costs_from_proto(message: pb.StepCosts) -> StepCosts | None:
    """The costs in a message. Returns None if it has no points or impossible ones, so that the costs are unknown."""
    points = tuple((point.tokens, point.seconds) for point in message.points)
    others = message.key_s, message.pair_s, message.decode_row_s, message.prompt_step_s
    ascending = all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(points))
    if not points or points[0][0] < 1 or points[0][1] <= 0 or not ascending:
        return None
    if not all(math.isfinite(number) and number >= 0 for number in (points[-1][1], *others)):
        return None
    return StepCosts(points, *others)


def take_unchanged(status: pb.NodeStatus, last: pb.NodeStatus) -> None:
    """Completes a status of a Watch stream in place: takes the fields that it leaves out from the stream's last one."""
    for number in status.unchanged_fields:
        field = pb.NodeStatus.DESCRIPTOR.fields_by_number.get(number)
        if field is None or field.message_type is None:
            continue  # a part that only a newer version knows
        theirs = getattr(last, field.name)
        if field.is_repeated:
            getattr(status, field.name).MergeFrom(theirs)
        elif last.HasField(field.name):  # type: ignore[arg-type]  # the stubs know literals only
            getattr(status, field.name).CopyFrom(theirs)
    status.ClearField("unchanged_fields")


def describe_loading(loading: node_status_pb2.Loading) -> str:
    """The stage of a node's start in words, such as "loading weights, 40 %"."""
    stage = shortened(loading.stage, _TEXT_MAX) or "starting"
    return f"{stage}, {min(100, 100 * loading.done // loading.total)} %" if loading.total else stage


def kept_bytes(spec: pb.CacheSpec) -> tuple[int, int]:
    """Bytes that a node keeps for each token, as if no layer had a window, and for each request's recurrent state.

    The spec may be of a newer peer: unknown kinds and dtypes count like the usual ones.
    """
    per_number = _DTYPE_BYTES.get(spec.dtype, 2) * (1 if spec.kind in (pb.KV_KIND_MLA, pb.KV_KIND_STATE) else 2)
    per_token = spec.num_layers * spec.num_kv_heads * spec.head_dim * per_number
    for part in ("index", "draft"):
        per_token += kept_bytes(getattr(spec, part))[0] if spec.HasField(part) else 0
    return per_token, kept_bytes(spec.state)[0] if spec.HasField("state") else 0


def check_times(request: decode_pb2.SubmitRequest | prefill_pb2.PrefillRequest) -> None:
    """Checks the times and factors of a gateway's request. With NaN among them a sorted queue loses other requests,
    and after an infinite wait a request would count as begun.

    Raises:
        InvalidRequest: one of them is negative, infinite or NaN.
    """
    for field, value in request.ListFields():
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise InvalidRequest(
                f"{field.name} is {value:g}",
                field=field.name,
                value=value,
                allowed=("a finite number, at least 0",),
                cure="update the gateway",
            )


def keep_time_to_proto(keep: KeepTime | None) -> lease_pb2.KvKeepTime | None:
    return None if keep is None else lease_pb2.KvKeepTime(seconds=keep.seconds, tenant=keep.tenant)


def keep_time_from_proto(request: decode_pb2.SubmitRequest | prefill_pb2.PrefillRequest) -> KeepTime | None:
    """The keep time of a request; a time that no gateway sends is none."""
    keep = request.keep
    if not request.HasField("keep") or not 0 <= keep.seconds <= KEEP_S_MAX:
        return None
    return KeepTime(keep.seconds, keep.tenant)


def kept_prefix_to_proto(kept: KeptPrefix) -> lease_pb2.KeptPrefix:
    return lease_pb2.KeptPrefix(
        address=kept.address,
        incarnation=kept.incarnation,
        tokens=kept.tokens,
        tensor_parallel_size=kept.ranks.size,
        attention_data_parallel=kept.ranks.own_requests,
    )


def kept_prefix_from_proto(message: lease_pb2.KeptPrefix) -> KeptPrefix | None:
    """The node that has KV already. Returns None if the message is empty: no such node is known."""
    ranks = ranks_from_proto(message)
    return KeptPrefix(message.address, message.incarnation, message.tokens, ranks) if message.address else None


def ranks_from_proto(message: lease_pb2.KeptPrefix | node_status_pb2.NodeInfo) -> NodeRanks:
    """How the ranks of a node share its KV."""
    return NodeRanks(message.tensor_parallel_size or 1, message.attention_data_parallel)
