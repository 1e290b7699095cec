"""Which nodes one request may still use."""

import pytest

from baton.core.errors import LOGITS_FIELD, DataLoss, Draining, InternalError, NoNode, Overloaded
from baton.core.types import LocalPolicy
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.node_choice import NodeChoice, prefill_failure
from baton.protos.v1 import node_status_pb2
from baton.rpc.error_detail import from_detail, to_detail
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, peer, rules, status


def decode_node(choice: NodeChoice, *, begun: bool, now_s: float = 0.0) -> FleetNode | None:
    chosen = choice.decode_node(64, begun=begun, now_s=now_s)
    return None if chosen is None else chosen[0]


def attempt_on(node: FleetNode, *, failed_calls: int = 0) -> Attempt:
    return Attempt(1, node, num_given=0, waiting_since_s=0.0, failed_calls=failed_calls)


def test_a_node_that_refused_is_not_chosen_again() -> None:
    fleet = SmallFleet(0, 2)
    choice = NodeChoice(rules(), fleet)
    first = decode_node(choice, begun=False)
    assert first is not None
    assert first is fleet.decodes["d1"]
    choice.refused(first, Draining("going away"))
    assert decode_node(choice, begun=False) is fleet.decodes["d2"]


def test_only_nodes_of_the_model_that_gave_tokens_continue_the_request() -> None:
    fleet = SmallFleet(0, 2)
    other = fleet.decodes["d2"]
    other.status.info.model.weights_digest = "other"
    other.take_status(other.status, "", 0.0)
    choice = NodeChoice(rules(), fleet)
    assert decode_node(choice, begun=False) is fleet.decodes["d1"]
    fleet.lose("d1")
    assert decode_node(choice, begun=True) is other
    choice.generated(fleet.decodes["d1"])
    assert decode_node(choice, begun=True) is None


def test_a_bug_in_a_node_opens_its_breaker_and_prompts_without_finite_logits_do_not() -> None:
    """Else a client with such a prompt takes one node after the other from everybody."""
    fleet = SmallFleet(0, 2)
    choice, node = NodeChoice(rules(), fleet), fleet.decodes["d1"]
    for _ in range(10):
        choice.failed(node, from_detail(to_detail(InternalError("not finite", field=LOGITS_FIELD))), 0.0)
    assert not fleet.breakers.open(0.0)
    for _ in range(3):
        choice.failed(node, InternalError("a bug"), 0.0)
    assert fleet.breakers.open(0.0) == {node.incarnation}


def test_a_node_that_says_it_is_stuck_gets_requests_only_where_there_is_no_other() -> None:
    """One of its ranks may be frozen: whatever is sent there waits until it stalls."""
    fleet = SmallFleet(0, 2)
    stuck = status(DECODE, 21)
    stuck.stuck = True
    fleet.status_received(DECODE, "d1", stuck, 0.0)
    for _ in range(5):
        chosen = decode_node(NodeChoice(rules(), fleet), begun=False)
        assert chosen is fleet.decodes["d2"]
        chosen.note_sent(100)
    fleet.lose("d2")
    assert decode_node(NodeChoice(rules(), fleet), begun=False) is fleet.decodes["d1"]
    fleet.connect("d1", 1.0)
    assert not fleet.breakers.open(1.0)


@pytest.mark.parametrize("begun", [False, True])
def test_overload_everywhere_is_the_requests_error(begun: bool) -> None:
    fleet = SmallFleet(0, 1)
    choice = NodeChoice(rules(), fleet)
    choice.refused(fleet.decodes["d1"], Overloaded("full", retry_after_s=1.0))
    with pytest.raises(Overloaded):
        decode_node(choice, begun=begun)


@pytest.mark.parametrize("lost", ["d1", "p1"])
def test_a_new_request_waits_for_a_node_only_shortly_after_its_loss_and_one_that_has_begun_always(lost: str) -> None:
    fleet = SmallFleet(1, 1, LocalPolicy.STRICT)
    choice = NodeChoice(rules(LocalPolicy.STRICT, failover_wait_s=20.0), fleet)
    fleet.lose(lost, now_s=5.0)
    assert decode_node(choice, begun=False, now_s=24.9) is None
    fleet.lose(lost, "connection refused", now_s=24.9)  # it was lost before
    assert decode_node(choice, begun=True, now_s=25.0) is None
    with pytest.raises(NoNode, match=r"cannot be used \(connection refused\)"):
        decode_node(choice, begun=False, now_s=25.0)


def test_a_new_request_waits_after_the_address_of_the_last_node_was_removed() -> None:
    """A pod that restarts is not listed for a moment."""
    fleet = SmallFleet(0, 1)
    fleet.remove(DECODE, "d1", 5.0)
    choice = NodeChoice(rules(failover_wait_s=20.0), fleet)
    assert decode_node(choice, begun=False, now_s=24.9) is None
    with pytest.raises(NoNode, match="no node address is known"):
        decode_node(choice, begun=False, now_s=25.0)


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_a_new_request_waits_while_the_only_node_drains(role: node_status_pb2.Role.ValueType) -> None:
    fleet = SmallFleet(1, 1, LocalPolicy.STRICT)
    draining = status(role, 11, peer(21)) if role == PREFILL else status(role, 21)
    draining.draining = True
    fleet.status_received(role, "p1" if role == PREFILL else "d1", draining, 0.0)
    assert decode_node(NodeChoice(rules(LocalPolicy.STRICT), fleet), begun=False, now_s=1000.0) is None


def test_a_new_request_does_not_wait_for_a_node_of_a_role_that_is_not_lacking() -> None:
    fleet = SmallFleet(1, 2, LocalPolicy.STRICT)
    choice = NodeChoice(rules(LocalPolicy.STRICT, failover_wait_s=20.0), fleet)
    fleet.lose("p1", now_s=0.0)
    assert decode_node(choice, begun=False, now_s=19.9) is None
    draining = status(DECODE, 22)
    draining.draining = True
    fleet.status_received(DECODE, "d2", draining, 19.0)
    with pytest.raises(NoNode, match="node-22 is draining"):
        decode_node(choice, begun=False, now_s=20.0)
    fleet.lose("d1", now_s=21.0)
    assert decode_node(choice, begun=False, now_s=21.0) is None, "now decode nodes are lacking too"


def test_a_new_request_waits_for_the_node_that_had_the_only_pair() -> None:
    fleet = SmallFleet(1, 2, LocalPolicy.STRICT)
    refused = peer(22, node_status_pb2.PEER_PHASE_REFUSED)
    refused.mismatches.add(field="batch_invariant", ours="on", theirs="off")
    fleet.status_received(PREFILL, "p1", status(PREFILL, 11, peer(21), refused), 0.0)
    choice = NodeChoice(rules(LocalPolicy.STRICT, failover_wait_s=20.0), fleet)
    fleet.lose("d1", now_s=1.0)
    assert decode_node(choice, begun=False, now_s=2.0) is None
    with pytest.raises(NoNode):
        decode_node(choice, begun=False, now_s=21.0)


def test_a_new_request_that_the_only_node_refused_because_it_drains_waits() -> None:
    fleet = SmallFleet(0, 1)
    choice = NodeChoice(rules(), fleet)
    choice.refused(fleet.decodes["d1"], Draining("going away"))
    assert decode_node(choice, begun=False, now_s=1000.0) is None
    fleet.connect("d1", 1001.0, restarts=1)
    assert decode_node(choice, begun=False, now_s=1001.0) is fleet.decodes["d1"]


def test_a_new_request_waits_for_nodes_that_load_and_is_told_what_they_do_when_its_time_is_up() -> None:
    fleet = SmallFleet(0, 2)
    choice = NodeChoice(rules(), fleet)
    for address in ("d1", "d2"):
        fleet.lose(address)
    info = node_status_pb2.NodeInfo(name="decode-0", role=DECODE)
    fleet.status_received(
        DECODE,
        "d1",
        node_status_pb2.NodeStatus(info=info, loading=node_status_pb2.Loading(stage="capturing graphs")),
        0.0,
    )
    assert decode_node(choice, begun=False) is None
    error = choice.no_decode_node("", 20.0)
    assert error.message == "no node is ready: decode-0 is capturing graphs"
    assert error.retry_after_s is not None
    fleet.lose("d1")
    with pytest.raises(NoNode, match="no node can take the request"):
        decode_node(choice, begun=False, now_s=1000.0)


def test_a_new_request_waits_while_a_node_is_reached_for_the_first_time() -> None:
    fleet = SmallFleet(0, 0)
    fleet.add(DECODE, "d1")
    choice = NodeChoice(rules(), fleet)
    assert decode_node(choice, begun=False) is None
    fleet.lost(DECODE, "d1", "connection refused", 1.0)
    with pytest.raises(NoNode, match="connection refused"):
        decode_node(choice, begun=False)


def test_a_silent_node_is_not_chosen_until_the_fleet_is_current() -> None:
    fleet = SmallFleet(0, 1)
    choice = NodeChoice(rules(), fleet)
    choice.mark_silent(fleet.decodes["d1"])
    assert decode_node(choice, begun=True) is None
    choice.clear_silent()
    assert decode_node(choice, begun=True) is fleet.decodes["d1"]


@pytest.mark.parametrize(
    ("policy", "calls"),
    [(LocalPolicy.STRICT, 3), (LocalPolicy.PREFER, 2), (LocalPolicy.ELASTIC, 2), (LocalPolicy.LOCAL, 0)],
)
def test_the_policy_limits_the_calls(policy: LocalPolicy, calls: int) -> None:
    fleet = SmallFleet(5, 1)
    choice = NodeChoice(rules(policy), fleet)
    decode = fleet.decodes["d1"]
    allowed = [choice.prefill_node(attempt_on(decode, failed_calls=failed), 64, 0.0) is not None for failed in range(5)]
    assert allowed == [failed < calls for failed in range(5)]


def test_a_prefill_node_gets_one_ticket_of_an_attempt() -> None:
    fleet = SmallFleet(2, 1)
    choice = NodeChoice(rules(), fleet)
    attempt = attempt_on(fleet.decodes["d1"])
    attempt.excluded.add(11)
    assert choice.prefill_node(attempt, 64, 0.0) is fleet.prefills["p2"]
    attempt.excluded.add(12)
    assert choice.prefill_node(attempt, 64, 0.0) is None


@pytest.mark.parametrize("last", [Overloaded("full"), DataLoss("damaged")])
def test_overload_and_data_loss_of_the_last_prefill_node_keep_their_type(last: Overloaded | DataLoss) -> None:
    attempt = attempt_on(SmallFleet(0, 1).decodes["d1"], failed_calls=1)
    attempt.last_error = last
    assert prefill_failure(attempt, NoNode("none")) is last


def test_without_any_call_the_reason_is_why_there_was_none() -> None:
    none = NoNode("none")
    assert prefill_failure(attempt_on(SmallFleet(0, 1).decodes["d1"]), none) is none
