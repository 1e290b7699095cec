"""The messages to nodes about a request."""

from dataclasses import replace

from baton.core.sampling import ResolvedSampling
from baton.core.types import LocalPolicy
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.request.node_messages import Due, NodeMessages
from baton.protos.internal.v1 import decode_pb2, lease_pb2
from baton.protos.v1 import generation_pb2
from decode_node.submitted import engine_request
from tests.unit.gateway.fleets import SmallFleet, request

REQUEST = replace(
    request(), priority=-2, cache_salt="salt", sampling=ResolvedSampling(max_tokens=4, seed=7, stop=("end",))
)

DUE = Due(ttft_budget_s=0.25, tpot_s=0.01)


def placed(way: Route) -> Placement:
    fleet = SmallFleet(1, 1)
    prefill = None if way is Route.LOCAL else fleet.prefills["p1"].view()
    return Placement(way, fleet.decodes["d1"].view(), prefill, 32 if way is Route.SPLIT else 0, "why", None)


def test_a_submission_has_the_prompt_and_the_output_so_far() -> None:
    messages = NodeMessages(REQUEST, LocalPolicy.STRICT)
    submission = messages.submit([5, 6], placed(Route.REMOTE), due=DUE, budget_s=9.0, max_queue_s=2.0)
    assert list(submission.prompt_token_ids) == REQUEST.prompt
    assert list(submission.output_token_ids) == [5, 6]
    assert (submission.request_id, submission.cache_salt, submission.sampling.seed) == ("r", "salt", 7)
    assert submission.policy == decode_pb2.LOCAL_POLICY_STRICT
    assert (submission.budget_s, submission.max_queue_s, submission.priority) == (9.0, 2.0, -2)


def test_a_prompt_that_came_as_ids_is_copied_from_the_client_s_message() -> None:
    given = replace(REQUEST, prompt_message=generation_pb2.TokenIds(ids=REQUEST.prompt))
    messages = NodeMessages(given, LocalPolicy.STRICT)
    submission = messages.submit([], placed(Route.REMOTE), due=DUE, budget_s=9.0, max_queue_s=2.0)
    prefill = messages.prefill([], lease_pb2.Ticket(), due=DUE, refuse_late=False)
    assert list(submission.prompt_token_ids) == list(prefill.prompt_token_ids) == list(REQUEST.prompt)


def test_a_prefill_has_the_ticket() -> None:
    ticket = lease_pb2.Ticket(lease=lease_pb2.Lease(number=3))
    prefill = NodeMessages(REQUEST, LocalPolicy.PREFER).prefill([5], ticket, due=DUE, refuse_late=True)
    assert prefill.ticket == ticket
    assert (list(prefill.output_token_ids), prefill.priority) == ([5], -2)
    assert (prefill.ttft_budget_s, prefill.refuse_late) == (0.25, True)


def test_nodes_learn_how_long_the_client_has_waited() -> None:
    messages, due = NodeMessages(REQUEST, LocalPolicy.PREFER), Due(None, None, waited_s=1.5)
    submission = messages.submit([], placed(Route.REMOTE), due=due, budget_s=9.0, max_queue_s=2.0)
    prefill = messages.prefill([], lease_pb2.Ticket(), due=due, refuse_late=False)
    assert submission.waited_s == prefill.waited_s == 1.5
    request = engine_request("r", submission, 10.0)
    assert (request.since_s, request.waited_s) == (8.5, 1.5)


def test_a_submission_says_where_the_prompt_is_prefilled() -> None:
    messages = NodeMessages(REQUEST, LocalPolicy.PREFER)
    split = messages.submit([], placed(Route.SPLIT), due=DUE, budget_s=1.0, max_queue_s=1.0)
    assert (split.placement, split.split_tokens, split.placement_why) == (decode_pb2.PLACEMENT_SPLIT, 32, "why")
    assert (split.ttft_budget_s, split.tpot_s, split.prefill_available) == (0.25, 0.01, True)
    local = messages.submit([], placed(Route.LOCAL), due=Due(None, None), budget_s=1.0, max_queue_s=1.0)
    assert (local.placement, local.prefill_available) == (decode_pb2.PLACEMENT_LOCAL, False)
    assert not local.HasField("ttft_budget_s")


def test_nodes_get_no_stop_strings() -> None:
    messages = NodeMessages(REQUEST, LocalPolicy.PREFER)
    submission = messages.submit([], placed(Route.LOCAL), due=DUE, budget_s=1.0, max_queue_s=1.0)
    assert not submission.sampling.stop
    assert not messages.prefill([], lease_pb2.Ticket(), due=DUE, refuse_late=False).sampling.stop
