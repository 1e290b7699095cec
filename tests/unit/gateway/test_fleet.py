"""The table of nodes: when a node is usable, unusable, and usable again."""

import math
from dataclasses import replace

import pytest

from baton.core.types import LocalPolicy
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.node_table import ChangeRole, DropSession, FleetCommand, LogLine
from baton.gateway.fleet.router import RoutedRequest
from baton.protos.v1 import node_status_pb2
from tests.unit.gateway.fleets import DECODE, MODEL, PREFILL, SmallFleet, decoding_node, peer, status

WANTED = RoutedRequest(num_tokens=64, policy=LocalPolicy.PREFER)


def lines(commands: list[FleetCommand]) -> list[str]:
    return [command.text for command in commands if isinstance(command, LogLine)]


def test_a_node_is_used_from_its_first_status_until_it_is_lost() -> None:
    fleet = Fleet(MODEL, 1000, LocalPolicy.PREFER)
    node = fleet.add(DECODE, "d1")
    assert not fleet.serves()
    assert decoding_node(fleet, WANTED) is None
    assert lines(fleet.status_received(DECODE, "d1", status(DECODE, 21), 1.0)) == [
        "node-21: connected, d1, KV NHD x 16"
    ]
    assert fleet.serves()
    assert decoding_node(fleet, WANTED) is node
    assert lines(fleet.status_received(DECODE, "d1", status(DECODE, 21), 2.0)) == []
    assert node.last_message_at_s == 1.0  # it only repeats itself
    assert fleet.lost(DECODE, "d1", "it ended the stream", 0.0) == [
        LogLine("node-21: lost, it ended the stream", warning=True),
        DropSession(DECODE, "d1", "it ended the stream"),
    ]
    assert not fleet.serves()
    fleet.status_received(DECODE, "d1", status(DECODE, 21), 3.0)
    assert decoding_node(fleet, WANTED) is node


def test_a_node_that_never_answered_is_named_once() -> None:
    fleet = Fleet(MODEL, 1000, LocalPolicy.PREFER)
    fleet.add(PREFILL, "p1")
    assert lines(fleet.lost(PREFILL, "p1", "Connection refused", 0.0)) == [
        "p1: unreachable, retrying: Connection refused"
    ]
    assert lines(fleet.lost(PREFILL, "p1", "Connection refused", 0.0)) == []


def test_requests_on_a_restarted_decode_node_are_dropped() -> None:
    fleet = SmallFleet(0, 1)
    commands = fleet.connect("d1", 1.0, restarts=1)
    assert DropSession(DECODE, "d1", "it was restarted") in commands
    assert fleet.decodes["d1"].reachable


def test_a_node_is_used_in_the_role_that_it_has_and_not_in_that_of_its_list() -> None:
    fleet = SmallFleet(1, 2)
    commands = fleet.status_received(DECODE, "d2", status(PREFILL, 30), 1.0)
    assert commands == [LogLine("node-30 is a prefill node now, d2"), ChangeRole("d2", DECODE, PREFILL)]
    assert fleet.prefills.keys() == {"p1", "d2"}
    assert fleet.decodes.keys() == {"d1"}
    assert not fleet.prefills["d2"].open, "it has only reported so, on a connection for decode nodes"
    fleet.status_received(PREFILL, "d2", status(PREFILL, 30), 1.1)
    assert fleet.prefills["d2"].open
    assert fleet.status_received(PREFILL, "d2", status(PREFILL, 30), 2.0) == []


def test_a_node_that_is_lost_in_another_role_is_expected_in_that_of_its_list() -> None:
    """As when it was killed, and starts again with the settings that it had."""
    fleet = SmallFleet(1, 2)
    for role in (DECODE, PREFILL):
        fleet.status_received(role, "d2", status(PREFILL, 30), 1.0)
    assert fleet.lost(PREFILL, "d2", "gone", 0.0) == [
        LogLine("node-30: lost, gone", warning=True), ChangeRole("d2", PREFILL, DECODE),
    ]  # fmt: skip
    assert fleet.lost(DECODE, "d2", "refused", 0.0) == [DropSession(DECODE, "d2", "refused")], "it has been named"
    fleet.status_received(DECODE, "d2", status(DECODE, 31), 2.0)
    assert fleet.decodes["d2"].open


def test_a_node_that_cannot_be_reached_in_the_role_that_it_names_is_not_used_and_tried_later() -> None:
    fleet = SmallFleet(1, 2)
    fleet.status_received(DECODE, "d2", status(PREFILL, 30), 1.0)
    assert fleet.lost(PREFILL, "d2", "wrong certificate", 0.0) == [ChangeRole("d2", PREFILL, DECODE)]
    (line, _) = fleet.status_received(DECODE, "d2", status(PREFILL, 30), 2.0)
    wrong = "it is a prefill node, not a decode node, and cannot be reached as one: wrong certificate"
    assert line == LogLine(f"d2 is not used: {wrong}", warning=True)
    assert fleet.status_received(DECODE, "d2", status(PREFILL, 30), 3.0) == [], "said once"
    assert not fleet.decodes["d2"].open
    assert ChangeRole("d2", DECODE, PREFILL) in fleet.status_received(DECODE, "d2", status(PREFILL, 30), 12.0)
    fleet.lost(PREFILL, "d2", "wrong certificate", 0.0)
    restarted = fleet.status_received(DECODE, "d2", status(PREFILL, 31), 12.5)
    assert ChangeRole("d2", DECODE, PREFILL) in restarted, "it may have another certificate"


def test_a_node_that_is_about_to_have_the_role_of_its_list_is_waited_for() -> None:
    """It has ended its session already, so it was lost in its old role."""
    fleet = SmallFleet(1, 2)
    back = status(PREFILL, 30)
    for role in (DECODE, PREFILL):
        fleet.status_received(role, "d2", back, 1.0)
    back.next_role = DECODE
    fleet.status_received(PREFILL, "d2", back, 2.0)
    assert fleet.lost(PREFILL, "d2", "it ended the session", 0.0) == [
        LogLine("node-30: switching its role, it ended the session"), ChangeRole("d2", PREFILL, DECODE),
    ]  # fmt: skip
    assert fleet.status_received(DECODE, "d2", back, 2.1) == []
    fleet.status_received(DECODE, "d2", status(DECODE, 31), 2.2)
    assert fleet.decodes["d2"].open


def test_a_retired_node_that_changes_its_role_stays_retired() -> None:
    fleet = SmallFleet(1, 2)
    fleet.decodes["d2"].retired = True
    for role in (DECODE, PREFILL):
        fleet.status_received(role, "d2", status(PREFILL, 30), 1.0)
    assert fleet.prefills["d2"].retired
    assert not fleet.prefills["d2"].open


def test_a_node_that_is_listed_for_both_roles_is_used_once() -> None:
    fleet = SmallFleet(1, 1)
    fleet.add(DECODE, "p1")
    wrong = "it is a prefill node, not a decode node"
    commands = fleet.status_received(DECODE, "p1", status(PREFILL, 11), 1.0)
    assert commands == [LogLine(f"p1 is not used: {wrong}", warning=True), DropSession(DECODE, "p1", wrong)]
    assert fleet.prefills["p1"].open


def test_a_node_with_a_role_of_a_newer_version_is_not_used() -> None:
    fleet = SmallFleet(0, 1)
    newer = status(DECODE, 30)
    newer.info.role = 7  # type: ignore[assignment]
    fleet.status_received(DECODE, "d1", newer, 1.0)
    assert fleet.explain() == "node-21 cannot be used (it is a role 7 node, not a decode node)"


def test_a_node_with_another_model_gets_no_requests() -> None:
    fleet = Fleet(MODEL, 1000, LocalPolicy.PREFER)
    fleet.add(DECODE, "d1")
    other = status(DECODE, 21)
    other.info.model.config_digest = "another"
    (_, foreign) = lines(fleet.status_received(DECODE, "d1", other, 1.0))
    assert foreign.startswith("node-21 gets no requests: it serves m (Llama, config digest another)")
    assert decoding_node(fleet, WANTED) is None
    assert fleet.max_context_tokens == 1000


def test_a_node_with_another_tokenizer_gets_no_requests_and_an_older_one_that_names_none_does() -> None:
    """The gateway's texts would not be what the node's tokens mean, and nothing else would show it."""
    model = node_status_pb2.ModelIdentity()
    model.CopyFrom(MODEL)
    model.vocabulary_digest = "ours"
    fleet = Fleet(model, 1000, LocalPolicy.PREFER)
    fleet.add(DECODE, "d1")
    for digest, refused in (("", False), ("others", True), ("ours", False)):
        reported = status(DECODE, 21)
        reported.info.model.vocabulary_digest = digest
        logged = " ".join(lines(fleet.status_received(DECODE, "d1", reported, 1.0)))
        assert ("node-21 gets no requests: its m has another tokenizer" in logged) == refused
        assert ("another tokenizer" in fleet.explain()) == refused


def test_sent_requests_count_until_the_next_status() -> None:
    fleet = SmallFleet(0, 2)
    first = decoding_node(fleet, WANTED)
    assert first is fleet.decodes["d1"]
    first.note_sent(64)
    assert decoding_node(fleet, WANTED) is fleet.decodes["d2"]
    assert first.view().tokens_since == 64
    fleet.connect("d1", 1.0)
    assert first.view().tokens_since == 0


def test_a_request_goes_where_one_rank_has_all_its_blocks() -> None:
    """Where ranks have requests of their own, free blocks of two ranks do not add up."""
    fleet = SmallFleet(0, 2)
    ranked = status(DECODE, 21)
    ranked.blocks_open[:] = [6, 6]
    busy = status(DECODE, 22)
    busy.requests_running = 9
    for address, reported in (("d1", ranked), ("d2", busy)):
        fleet.status_received(DECODE, address, reported, 1.0)
    node = fleet.decodes["d1"]
    assert decoding_node(fleet, replace(WANTED, num_tokens=95)) is node
    assert decoding_node(fleet, replace(WANTED, num_tokens=96)) is fleet.decodes["d2"]
    for sent, expected in ((79, 6), (79, 1), (15, 1), (15, 0)):
        node.note_sent(sent)
        assert node.view().room_tokens == 16 * expected
    assert decoding_node(fleet, WANTED) is fleet.decodes["d2"]


def test_strict_serves_only_with_a_pair() -> None:
    fleet = SmallFleet(1, 1, LocalPolicy.STRICT)
    assert fleet.serves()
    fleet.prefills["p1"].take_peer(peer(21, node_status_pb2.PEER_PHASE_REFUSED))
    assert not fleet.serves()
    fleet.prefills["p1"].take_peer(peer(21))
    assert fleet.serves()


def test_draining_and_retired_nodes_get_no_requests() -> None:
    fleet = SmallFleet(0, 2)
    draining = status(DECODE, 21)
    draining.draining = True
    fleet.status_received(DECODE, "d1", draining, 1.0)
    fleet.decodes["d2"].retired = True
    assert decoding_node(fleet, WANTED) is None
    assert "node-21 is draining" in fleet.explain()


def test_the_longest_context_is_that_of_the_largest_decode_node() -> None:
    fleet = SmallFleet(0, 1)
    assert fleet.max_context_tokens == 1000
    larger = status(DECODE, 21)
    larger.info.max_context_tokens = 600
    fleet.status_received(DECODE, "d1", larger, 1.0)
    assert fleet.max_context_tokens == 600


def test_the_report_has_the_peers_as_they_are_now() -> None:
    fleet = SmallFleet(1, 1)
    fleet.prefills["p1"].take_peer(peer(21, node_status_pb2.PEER_PHASE_REFUSED))
    prefill, decode = fleet.report()
    assert (prefill.address, prefill.reachable) == ("p1", True)
    assert [each.phase for each in prefill.status.peers] == [node_status_pb2.PEER_PHASE_REFUSED]
    assert decode.address == "d1"


def test_a_fleet_without_addresses_explains_itself() -> None:
    assert Fleet(MODEL, 1000, LocalPolicy.PREFER).explain() == "no node address is known"


def test_what_clients_read_about_an_unreachable_node_has_no_address() -> None:
    fleet = Fleet(MODEL, 1000, LocalPolicy.PREFER)
    fleet.add(PREFILL, "10.0.0.7:7101")
    fleet.lost(PREFILL, "10.0.0.7:7101", "Connection refused", 0.0)
    assert fleet.explain() == "a prefill node cannot be used (Connection refused)"


@pytest.mark.parametrize("reported", [math.nan, math.inf, -1.0])
def test_a_node_with_an_impossible_backlog_does_not_hide_the_others(reported: float) -> None:
    fleet = SmallFleet(2, 1, LocalPolicy.STRICT)
    for address, incarnation, backlog_s in (("p1", 11, reported), ("p2", 12, 0.5)):
        sent = status(PREFILL, incarnation, peer(21))
        sent.backlog_s = backlog_s
        sent.step_costs.points.add(tokens=1, seconds=0.01)
        fleet.status_received(PREFILL, address, sent, 1.0)
    assert fleet.prefills["p1"].queue_s(1.0) == 0.0
    assert fleet.pick_prefill(fleet.decodes["d1"], WANTED, 0.0) is not None


def loading(name: str, stage: str, done: int = 0, total: int = 0) -> node_status_pb2.NodeStatus:
    info = node_status_pb2.NodeInfo(name=name, role=DECODE)
    return node_status_pb2.NodeStatus(info=info, loading=node_status_pb2.Loading(stage=stage, done=done, total=total))


def test_a_node_that_loads_is_named_with_its_progress_and_gets_no_requests() -> None:
    fleet = SmallFleet(0, 1)
    fleet.lose("d1")
    for done in (0, 2):
        commands = fleet.status_received(DECODE, "d1", loading("decode-0", "loading weights", done, 5), 1.0)
        assert bool(commands) == (done == 0)  # one line in the log
    assert fleet.nodes_load()
    assert not fleet.serves()
    assert decoding_node(fleet, WANTED) is None
    assert fleet.explain() == "decode-0 is loading weights, 40 %"
    fleet.connect("d1", 2.0, restarts=1)
    assert not fleet.nodes_load()
    assert fleet.serves()


def test_while_nodes_load_they_alone_explain_why_none_is_ready() -> None:
    fleet = SmallFleet(0, 2)
    fleet.lose("d1", "connection refused")
    fleet.status_received(DECODE, "d2", loading("decode-1", "capturing graphs"), 1.0)
    assert fleet.explain() == "decode-1 is capturing graphs"


def test_a_node_that_is_lost_while_it_loads_is_no_longer_loading() -> None:
    fleet = SmallFleet(0, 1)
    fleet.status_received(DECODE, "d1", loading("decode-0", "loading weights", 2, 5), 1.0)
    assert lines(fleet.lose("d1", "connection refused")) == [
        "decode-0: lost, while it was loading weights, 40 %: connection refused"
    ]
    assert not fleet.nodes_load()
    assert fleet.explain() == "decode-0 cannot be used (connection refused)"


def test_a_restarted_node_that_loads_drops_the_session_with_what_it_was() -> None:
    fleet = SmallFleet(0, 1)
    commands = fleet.status_received(DECODE, "d1", loading("decode-0", "starting"), 1.0)
    assert DropSession(DECODE, "d1", "it was restarted") in commands
    assert not fleet.decodes["d1"].reachable


def test_a_node_that_never_sent_a_status_is_waited_for() -> None:
    fleet = SmallFleet(0, 0)
    fleet.add(DECODE, "d1")
    fleet.silent(DECODE, "d1")
    assert fleet.nodes_load()
    assert fleet.explain() == "a decode node is starting, it sends no status yet"


def test_a_silent_node_that_sent_a_status_before_is_not_waited_for() -> None:
    fleet = SmallFleet(0, 1)
    fleet.silent(DECODE, "d1")
    assert not fleet.nodes_load()
    fleet.lose("d1", "it does not answer")
    fleet.silent(DECODE, "d1")
    assert not fleet.nodes_load()
    assert fleet.explain() == "node-21 cannot be used (it does not answer)"


def test_a_status_that_only_repeats_the_last_one_is_no_sign_of_life() -> None:
    fleet = SmallFleet(0, 1)
    fleet.status_received(DECODE, "d1", status(DECODE, 21), 5.0)
    assert fleet.decodes["d1"].last_message_at_s == 0.0
    works = status(DECODE, 21)
    works.requests_running = 1
    fleet.status_received(DECODE, "d1", works, 6.0)
    assert fleet.decodes["d1"].last_message_at_s == 6.0


@pytest.mark.parametrize("loads", [False, True])
def test_a_restarted_node_has_nothing_of_the_process_before(loads: bool) -> None:
    """Whether it reports while it loads or not, and although it lists as few peers as a node that loads."""
    fleet = SmallFleet(1, 1)
    prefill, decode = fleet.prefills["p1"], fleet.decodes["d1"]
    refused = peer(21, node_status_pb2.PEER_PHASE_REFUSED)
    refused.mismatches.add(field="batch_invariant", ours="on", theirs="off")
    fleet.status_received(PREFILL, "p1", status(PREFILL, 11, refused), 1.0)
    decode.second_token.add(0.09, 1.0)
    assert prefill.refused == {21}
    assert decode.second_token.at(1.0) > 0.0
    for role, address, incarnation in ((PREFILL, "p1", 111), (DECODE, "d1", 121)):
        fleet.lose(address, now_s=2.0)
        new = status(role, incarnation)
        if loads:
            loading = node_status_pb2.Loading(stage="loading weights")
            fleet.status_received(role, address, node_status_pb2.NodeStatus(info=new.info, loading=loading), 3.0)
        fleet.status_received(role, address, new, 4.0)
    assert prefill.incarnation == 111
    assert not prefill.refused | prefill.ready_peers
    assert not prefill.peers
    assert decode.second_token.at(4.0) == 0.0


def test_a_node_that_was_silent_for_a_while_has_the_peers_that_it_reports() -> None:
    fleet = SmallFleet(1, 1)
    prefill = fleet.prefills["p1"]
    assert prefill.ready_peers == {21}
    silent = node_status_pb2.NodeStatus(info=prefill.status.info, loading=node_status_pb2.Loading(stage="silent"))
    fleet.status_received(PREFILL, "p1", silent, 1.0)
    fleet.status_received(PREFILL, "p1", status(PREFILL, 11), 2.0)
    assert prefill.ready_peers == set()
