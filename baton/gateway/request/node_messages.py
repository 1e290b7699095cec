"""Builds the messages to nodes about one request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.kv_entries import KeptPrefix
from baton.core.types import DEFAULT_OBJECTIVE, LocalPolicy, Objective
from baton.gateway.core.request import Request
from baton.gateway.fleet.placement import Placement, Route
from baton.protos.internal.v1 import decode_pb2, lease_pb2, prefill_pb2
from baton.rpc.convert import adapter_to_proto, sampling_to_proto
from baton.rpc.convert_node import keep_time_to_proto, kept_prefix_to_proto

_POLICIES = {
    LocalPolicy.STRICT: decode_pb2.LOCAL_POLICY_STRICT,
    LocalPolicy.PREFER: decode_pb2.LOCAL_POLICY_PREFER,
    LocalPolicy.ELASTIC: decode_pb2.LOCAL_POLICY_PREFER,
    LocalPolicy.LOCAL: decode_pb2.LOCAL_POLICY_LOCAL,
}


_PLACEMENTS = {
    Route.REMOTE: decode_pb2.PLACEMENT_REMOTE,
    Route.LOCAL: decode_pb2.PLACEMENT_LOCAL,
    Route.SPLIT: decode_pb2.PLACEMENT_SPLIT,
}


@dataclass(frozen=True)
class Due:
    """The remaining part of a request's SLO; None: no bound.

    Args:
        ttft_budget_s: time until the first token is due; 0 if it is late or the client already has it.
        waited_s: for how long the client has waited for its first token; 0 if it has it.
    """

    ttft_budget_s: float | None
    tpot_s: float | None
    waited_s: float = 0.0


def step_token(first: prefill_pb2.PrefillFirstToken) -> decode_pb2.StepToken:
    """A prefill node's first token, as a decode node would send it."""
    return decode_pb2.StepToken(
        token=first.token,
        finish_reason=first.finish_reason,
        stop_reason=first.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
    )


class NodeMessages:
    """Builds the messages. `output` in their arguments is the token ids sent to the client so far."""

    def __init__(self, request: Request, policy: LocalPolicy, objective: Objective = DEFAULT_OBJECTIVE) -> None:
        self._request = request
        # protobuf copies one repeated field to another in microseconds, and a list token by token.
        self._prompt = request.prompt if request.prompt_message is None else request.prompt_message.ids
        self._adapter = None if request.adapter is None else adapter_to_proto(request.adapter)
        self._keep = keep_time_to_proto(request.keep)
        self._policy, self._objective = policy, objective
        # The gateway checks stop strings, because nodes see no text.
        self._sampling = sampling_to_proto(request.sampling)
        del self._sampling.stop[:]

    def submit(
        self,
        output: Sequence[int],
        placement: Placement,
        *,
        due: Due,
        budget_s: float,
        max_queue_s: float,
        prefill_incarnation: int = 0,
        kept_elsewhere: KeptPrefix | None = None,
    ) -> decode_pb2.SubmitRequest:
        message = decode_pb2.SubmitRequest(
            request_id=self._request.request_id,
            output_token_ids=output,
            sampling=self._sampling,
            cache_salt=self._request.cache_salt,
            adapter=self._adapter,
            keep=self._keep,
            policy=_POLICIES[self._policy],
            prefill_available=placement.prefill is not None or placement.route is not Route.LOCAL,
            prefill_incarnation=prefill_incarnation,
            budget_s=budget_s,
            max_queue_s=max_queue_s,
            priority=self._request.priority,
            placement=_PLACEMENTS[placement.route],
            placement_why=placement.why,
            split_tokens=placement.split_tokens,
            ttft_budget_s=due.ttft_budget_s,
            tpot_s=due.tpot_s,
            gap_factor=self._objective.gap_factor,
            ttft_factor=self._objective.ttft_factor,
            waited_s=due.waited_s,
            to_prefill_node=placement.decode.also_prefills,
            kept_elsewhere=None if kept_elsewhere is None else kept_prefix_to_proto(kept_elsewhere),
            traceparent=self._request.traceparent,
        )
        message.prompt_token_ids.extend(self._prompt)
        return message

    def prefill(
        self,
        output: Sequence[int],
        ticket: lease_pb2.Ticket,
        *,
        due: Due,
        refuse_late: bool,
        kept_elsewhere: KeptPrefix | None = None,
    ) -> prefill_pb2.PrefillRequest:
        message = prefill_pb2.PrefillRequest(
            request_id=self._request.request_id,
            output_token_ids=output,
            sampling=self._sampling,
            cache_salt=self._request.cache_salt,
            adapter=self._adapter,
            keep=self._keep,
            ticket=ticket,
            priority=self._request.priority,
            ttft_budget_s=due.ttft_budget_s,
            refuse_late=refuse_late,
            ttft_factor=self._objective.ttft_factor,
            waited_s=due.waited_s,
            kept_elsewhere=None if kept_elsewhere is None else kept_prefix_to_proto(kept_elsewhere),
            traceparent=self._request.traceparent,
        )
        message.prompt_token_ids.extend(self._prompt)
        return message
