"""Reads a gateway's message about a new request. Pure."""

from baton.core.token_ids import token_array
from baton.core.types import DEFAULT_OBJECTIVE
from baton.engine.request import EngineRequest
from baton.engine.scheduling.slices import DEFAULT_TTFT_S
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.rpc.convert import adapter_from_proto, resolved_sampling_from_proto
from baton.rpc.convert_node import check_times, keep_time_from_proto, kept_prefix_from_proto


def engine_request(engine_id: str, submit: pb.SubmitRequest, now_s: float) -> EngineRequest:
    """The engine's request for a gateway's message that comes now.

    Raises:
        InvalidRequest: a sampling parameter, a token id or a time is out of range.
    """
    check_times(submit)
    # A first token is useless once its client has given up. A longer budget says nothing about the first token.
    soon = submit.HasField("budget_s") and submit.budget_s < DEFAULT_TTFT_S
    gives_up_s = now_s + submit.budget_s if soon else None
    return EngineRequest(
        request_id=engine_id,
        prompt=token_array(submit.prompt_token_ids, field="prompt"),
        output=tuple(submit.output_token_ids),
        sampling=resolved_sampling_from_proto(submit.sampling),
        cache_salt=submit.cache_salt,
        keep=keep_time_from_proto(submit),
        adapter=adapter_from_proto(submit.adapter),
        priority=submit.priority,
        due_s=now_s + submit.ttft_budget_s if submit.HasField("ttft_budget_s") else gives_up_s,
        refuse_late=gives_up_s is not None and not submit.HasField("ttft_budget_s"),
        tpot_s=submit.tpot_s if submit.HasField("tpot_s") else None,
        gap_factor=submit.gap_factor or DEFAULT_OBJECTIVE.gap_factor,
        ttft_factor=submit.ttft_factor or DEFAULT_OBJECTIVE.ttft_factor,
        since_s=now_s - submit.waited_s,
        waited_s=submit.waited_s,
        kept_elsewhere=kept_prefix_from_proto(submit.kept_elsewhere),
    )


def placement_name(placement: pb.Placement.ValueType) -> str:
    """The placement's name, or its number if only a later version knows it."""
    return pb.Placement.Name(placement) if placement in pb.Placement.values() else str(placement)
