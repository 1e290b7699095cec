"""The messages to nodes about a request."""

from dataclasses import replace

from baton.types import LocalPolicy, SamplingParams
from gateway.node_messages import NodeMessages
from protos.baton.v1 import common_pb2, decode_pb2
from tests.unit.gateway.fleets import request

REQUEST = replace(
    request(), priority=-2, cache_salt="salt", sampling=SamplingParams(max_tokens=4, seed=7, stop=("end",))
)


def test_a_submission_has_the_prompt_and_the_output_so_far() -> None:
    messages = NodeMessages(REQUEST, LocalPolicy.STRICT)
    submission = messages.submit([5, 6], prefill_available=True, budget_s=9.0, queue_s=2.0)
    assert list(submission.prompt_token_ids) == REQUEST.prompt
    assert list(submission.output_token_ids) == [5, 6]
    assert (submission.request_id, submission.cache_salt, submission.sampling.seed) == ("r", "salt", 7)
    assert submission.policy == decode_pb2.LOCAL_POLICY_STRICT
    assert (submission.budget_s, submission.queue_s, submission.priority) == (9.0, 2.0, -2)


def test_a_prefill_has_the_ticket() -> None:
    ticket = common_pb2.Ticket(lease=common_pb2.Lease(number=3))
    prefill = NodeMessages(REQUEST, LocalPolicy.PREFER).prefill([5], ticket)
    assert prefill.ticket == ticket
    assert (list(prefill.output_token_ids), prefill.priority) == ([5], -2)


def test_nodes_get_no_stop_strings() -> None:
    messages = NodeMessages(REQUEST, LocalPolicy.PREFER)
    submission = messages.submit([], prefill_available=False, budget_s=1.0, queue_s=1.0)
    assert not submission.sampling.stop
    assert not messages.prefill([], common_pb2.Ticket()).sampling.stop
