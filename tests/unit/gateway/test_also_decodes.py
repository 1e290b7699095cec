"""Prefill nodes that also decode: one node each, for requests without a hand-over."""

from dataclasses import replace

import pytest

from baton.core.errors import Draining, NoNode, Overloaded
from baton.core.types import LocalPolicy
from baton.gateway.core.events import FleetChanged, SessionLost, Started, TimePassed
from baton.gateway.fleet.node_table import DropSession, LogLine
from baton.gateway.fleet.placement import Route
from baton.gateway.fleet.router import RoutedRequest
from baton.gateway.request.commands import CallPrefill, LeaveDecode, LoseNode, Respond, SubmitToDecode
from baton.gateway.request.pairing import ConnectNodes, Pairing
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, decoding_node, peer, status
from tests.unit.gateway.served import LENGTH, Served, accepted, failed, of, only, reserved, token

WANTED = RoutedRequest(num_tokens=64, policy=LocalPolicy.ELASTIC)
GONE = "gone"


def also_decode(fleet: SmallFleet, *addresses: str, restarts: int = 0, **changes: object) -> None:
    """These prefill nodes report that they also decode; a restarted one has another incarnation."""
    for address in addresses:
        node = fleet.prefills[address]
        reported = status(PREFILL, 10 + int(address[1:]) + 100 * restarts, *node.peers.values())
        reported.info.also_decodes = True
        for name, value in changes.items():
            setattr(reported, name, value)
        fleet.status_received(PREFILL, address, reported, 1.0)


def alone(policy: LocalPolicy = LocalPolicy.ELASTIC, *, decodes: int = 0) -> Served:
    """A request in a fleet with two prefill nodes that also decode; it has begun on p1 if there is no decode node."""
    return Served(decodes=decodes, policy=policy, also_decode=True)


# ---- the fleet


def test_it_is_listed_once_and_pairs_as_a_prefill_node_only() -> None:
    fleet = SmallFleet(2, 1, also_decode=True)
    assert [node.address for node in fleet.nodes()] == ["p1", "p2", "d1"]
    assert [(load.address, load.role) for load in fleet.loads()] == [("p1", PREFILL), ("p2", PREFILL), ("d1", DECODE)]
    assert [report.address for report in fleet.report()] == ["p1", "p2", "d1"]
    assert fleet.explain().count("node-11") == 1
    assert [(p.address, d.address) for p, d in fleet.pairs()] == [("p1", "d1"), ("p2", "d1")]
    for node in fleet.prefills.values():
        node.peers.clear()
    asked = [command for command in Pairing(fleet, 10.0).check(1.0) if isinstance(command, ConnectNodes)]
    assert [each.pair for each in asked] == [(11, 21), (12, 21)]
    assert fleet.prefills["p1"].decode_view().ready_peers == frozenset()


def test_it_is_connected_and_lost_with_one_line() -> None:
    fleet = SmallFleet(0, 0)
    fleet.add(PREFILL, "p1")
    reported = status(PREFILL, 11)
    reported.info.also_decodes = True
    assert len([each for each in fleet.status_received(PREFILL, "p1", reported, 1.0) if isinstance(each, LogLine)]) == 1
    assert fleet.lose("p1") == [LogLine("node-11: lost, gone", warning=True), DropSession(PREFILL, "p1", GONE)]
    assert decoding_node(fleet, WANTED) is None


@pytest.mark.parametrize("policy", LocalPolicy)
def test_without_a_usable_decode_node_it_serves_requests_alone_unless_the_policy_is_strict(policy: LocalPolicy) -> None:
    fleet = SmallFleet(2, 1, policy)
    also_decode(fleet, "p2")
    assert decoding_node(fleet, replace(WANTED, policy=policy)) is fleet.decodes["d1"]
    fleet.lose("d1")
    placement = fleet.place(replace(WANTED, policy=policy), 0.0)
    assert fleet.serves() is (placement is not None) is (policy is not LocalPolicy.STRICT)
    if placement is not None:
        assert fleet.decoding_node(placement.decode) is fleet.prefills["p2"]
        assert (placement.route, placement.prefill, placement.reason) == (
            Route.LOCAL,
            None,
            "no decode node is available",
        )


def test_a_restarted_process_that_only_computes_prompts_gets_no_more_requests_of_its_own() -> None:
    fleet = SmallFleet(1, 0)
    also_decode(fleet, "p1")
    assert decoding_node(fleet, WANTED) is fleet.prefills["p1"]
    assert DropSession(PREFILL, "p1", "it was restarted") in fleet.connect("p1", 2.0, restarts=1)
    assert decoding_node(fleet, WANTED) is None
    assert not fleet.serves()
    also_decode(fleet, "p1", restarts=2)
    assert decoding_node(fleet, WANTED) is fleet.prefills["p1"]


def test_it_gets_nothing_while_it_drains_or_is_no_longer_listed() -> None:
    fleet = SmallFleet(2, 0, also_decode=True)
    also_decode(fleet, "p1", draining=True)
    assert decoding_node(fleet, WANTED) is fleet.prefills["p2"]
    fleet.prefills["p2"].retired = True
    assert decoding_node(fleet, WANTED) is None


def test_another_role_at_its_address_is_not_used_to_decode() -> None:
    fleet = SmallFleet(1, 0)
    also_decode(fleet, "p1")
    fleet.status_received(PREFILL, "p1", status(DECODE, 30), 2.0)
    assert decoding_node(fleet, WANTED) is None


def test_what_it_serves_alone_counts_as_its_work_for_prompts_too() -> None:
    served = Served(prefills=2, decodes=0, start=False)
    served.fleet.add(DECODE, "d1")
    for address, incarnation in (("p1", 11), ("p2", 12)):
        reported = status(PREFILL, incarnation, peer(21))
        reported.info.also_decodes = True
        reported.step_costs.points.add(tokens=1, seconds=0.1)
        served.fleet.status_received(PREFILL, address, reported, 0.0)
    served.handle(Started())
    assert only(served.commands, SubmitToDecode).address == "p1"
    assert served.fleet.prefills["p1"].queue_s(0.0) > 1.0 > served.fleet.prefills["p2"].queue_s(0.0)
    served.fleet.connect("d1", 0.0)
    placement = served.fleet.place(replace(WANTED, policy=LocalPolicy.PREFER), 0.0)
    assert placement is not None
    assert placement.prefill is not None
    assert placement.prefill.address == "p2"


def test_a_session_comes_back_to_the_prefill_node_that_served_it_alone_and_to_its_decode_node() -> None:
    fleet = SmallFleet(2, 2, also_decode=True)
    mine = replace(WANTED, session_id="s")
    decode = decoding_node(fleet, mine)
    assert decode is fleet.decodes["d1"]
    for address in ("d1", "d2"):
        fleet.lose(address)
    fleet.prefills["p1"].note_sent(64)
    assert decoding_node(fleet, mine) is fleet.prefills["p2"]
    for address in ("d1", "d2"):
        fleet.connect(address, 2.0)
    also_decode(fleet, "p1", "p2")
    for node in (fleet.decodes["d1"], fleet.prefills["p2"]):
        node.note_sent(0)  # others have had fewer requests by now
    also_decode(fleet, "p2")
    fleet.connect("d1", 3.0)
    placement = fleet.place(mine, 3.0)
    assert placement is not None
    assert placement.prefill is not None
    assert (placement.decode.address, placement.prefill.address) == ("d1", "p2")


# ---- one request


def test_a_request_is_served_whole() -> None:
    served = alone()
    submit = only(served.commands, SubmitToDecode)
    assert (submit.role, submit.address) == (PREFILL, "p1")
    assert submit.request.placement == decode_pb2.PLACEMENT_LOCAL
    assert submit.request.policy == decode_pb2.LOCAL_POLICY_PREFER
    assert not submit.request.prefill_available
    served.decode(decode_pb2.Accepted(why=submit.request.placement_why), token(0), token(1, LENGTH))
    assert served.error is None
    assert not of(served.commands, CallPrefill)
    receipt = served.receipt
    assert (receipt.path, receipt.decode_node, receipt.prefill_node) == (common_pb2.PATH_LOCAL, "node-11", "")
    assert receipt.why == "prompt prefilled on node-11: no decode node is available"


def test_a_request_that_loses_its_decode_node_continues_there_and_from_there_on_a_decode_node() -> None:
    served = alone(decodes=1)
    assert only(served.commands, SubmitToDecode).role == DECODE
    served.decode(accepted(), token(0), token(1))
    served.fleet.lose("d1")
    submit = only(served.handle(SessionLost(1, GONE)), SubmitToDecode)
    assert (submit.role, submit.request.placement) == (PREFILL, decode_pb2.PLACEMENT_LOCAL)
    assert list(submit.request.output_token_ids) == [100, 101]
    served.decode(accepted(), token(2), attempt=2)
    served.fleet.connect("d1", 1.0, restarts=1)
    served.fleet.lose(submit.address)
    third = only(served.handle(SessionLost(2, GONE)), SubmitToDecode)
    assert (third.role, third.address) == (DECODE, "d1")
    assert list(third.request.output_token_ids) == [100, 101, 102]
    served.decode(accepted(), token(3, LENGTH), attempt=3)
    assert served.error is None
    assert served.token_ids == [100, 101, 102, 103]


def test_one_that_is_silent_is_lost_as_the_prefill_node_that_it_is() -> None:
    served = alone()
    served.decode(accepted(), token(0))
    also_decode(served.fleet, "p2")
    commands = served.handle(TimePassed(), after_s=31.0)
    assert only(commands, LoseNode).role == PREFILL
    assert not served.fleet.prefills["p1"].reachable
    assert only(commands, SubmitToDecode).address == "p2"


@pytest.mark.parametrize("error", [Overloaded("full"), Draining("going away")])
def test_one_that_refuses_is_not_asked_again_but_may_still_compute_the_prompt(error: Overloaded | Draining) -> None:
    served = alone()
    served.fleet.lose("p2")
    served.fleet.add(DECODE, "d1")
    served.fleet.prefills["p1"].take_peer(peer(21))
    served.fleet.connect("d1", 1.0)
    assert only(served.decode(failed(error)), SubmitToDecode).address == "d1"
    assert only(served.decode(reserved(), attempt=2), CallPrefill).address == "p1"


def test_one_that_has_no_room_for_a_request_that_lost_its_decode_node_leaves_it_waiting_for_the_next() -> None:
    served = alone(decodes=1)
    served.fleet.lose("p2")
    served.decode(accepted(), token(0))
    served.fleet.lose("d1")
    assert only(served.handle(SessionLost(1, GONE)), SubmitToDecode).address == "p1"
    served.decode(failed(Overloaded("full")), attempt=2)
    assert served.machine.waits_for_fleet
    served.fleet.connect("d1", 1.0, restarts=1)
    assert only(served.handle(FleetChanged()), SubmitToDecode).address == "d1"


def test_a_request_waits_for_any_node_that_decodes() -> None:
    served = alone()
    served.fleet.lose("p2")
    served.decode(accepted(), token(0))
    served.fleet.lose("p1")
    assert only(served.handle(SessionLost(1, GONE)), Respond).message.notice.startswith("the node node-11 was lost")
    also_decode(served.fleet, "p2", restarts=1)
    assert served.machine.waits_for_fleet
    assert only(served.handle(FleetChanged()), SubmitToDecode).address == "p2"
    assert only(served.commands, LeaveDecode).attempt == 1


def test_under_policy_strict_a_request_never_begins_there() -> None:
    served = alone(LocalPolicy.STRICT)
    assert isinstance(served.error, NoNode)
