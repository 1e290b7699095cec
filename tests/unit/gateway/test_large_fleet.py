"""Requests in a large cluster: each is placed among a few nodes, and goes to nodes that are paired."""

from dataclasses import replace

import pytest

from baton.core.costs import StepCosts
from baton.core.types import AdapterRef, LocalPolicy
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement
from baton.gateway.fleet.router import RoutedRequest, pick_pair
from baton.gateway.fleet.watch_pace import WatchPace
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import costs_to_proto
from tests.unit.gateway.fleets import DECODE, MODEL, PREFILL, peer, status

COSTS = StepCosts(((1, 0.005), (2048, 0.05)))
SQL = AdapterRef("sql", "1" * 32)
ROLES = {PREFILL: "p", DECODE: "d"}


def large(nodes_of_a_role: int = 60, policy: LocalPolicy = LocalPolicy.STRICT, *, also_decode: bool = False) -> Fleet:
    """A cluster with costs, whose chosen pairs are ready."""
    fleet = Fleet(MODEL, 1000, policy)
    for role, letter in ROLES.items():
        for number in range(nodes_of_a_role):
            fleet.add(role, f"{letter}{number}")
            report(fleet, role, number, also_decodes=also_decode and role == PREFILL)
    for prefill, decode in fleet.pairs():
        prefill.take_peer(peer(decode.incarnation))
    return fleet


def report(
    fleet: Fleet,
    role: node_status_pb2.Role.ValueType,
    number: int,
    *,
    waits_s: float = 0.0,
    adapters: tuple[AdapterRef, ...] = (),
    also_decodes: bool = False,
    draining: bool = False,
) -> None:
    """The node's next status."""
    address = f"{ROLES[role]}{number}"
    known = fleet.node(role, address).peers.values()
    message = status(role, 10_000 * role + number + 1, *known)
    message.step_costs.CopyFrom(costs_to_proto(COSTS))
    message.backlog_s, message.draining, message.info.also_decodes = waits_s, draining, also_decodes
    message.adapters.extend(node_status_pb2.Adapter(name=each.name, revision=each.revision) for each in adapters)
    fleet.status_received(role, address, message, 0.0)


def placed(fleet: Fleet, now_s: float = 0.0, **wanted: object) -> Placement:
    placement = fleet.place(replace(RoutedRequest(100, LocalPolicy.STRICT), **wanted), now_s)  # type: ignore[arg-type]
    assert placement is not None
    assert placement.prefill is not None
    assert placement.decode.incarnation in placement.prefill.ready_peers
    return placement


def test_requests_spread_over_all_nodes_and_go_to_pairs() -> None:
    fleet = large()
    used: dict[str, int] = {}
    for _ in range(600):
        placement = placed(fleet)
        for view, role in ((placement.prefill, PREFILL), (placement.decode, DECODE)):
            assert view is not None
            used[view.address] = used.get(view.address, 0) + 1
            fleet.node(role, view.address).note_sent(100)
            fleet.node(role, view.address).note_prompt(0, 100, 0.0)
    assert len(used) == 120
    assert max(used.values()) < 40


def test_nodes_with_a_queue_get_nothing_while_others_are_free() -> None:
    fleet = large()
    for number in range(30):
        report(fleet, PREFILL, number, waits_s=5.0)
    for _ in range(50):
        prefill = placed(fleet).prefill
        assert prefill is not None
        assert int(prefill.address[1:]) >= 30


def test_the_only_nodes_with_an_adapter_are_found() -> None:
    fleet = large()
    report(fleet, PREFILL, 7, adapters=(SQL,))
    report(fleet, DECODE, 33, adapters=(SQL,))
    for prefill, decode in fleet.pairs():
        prefill.take_peer(peer(decode.incarnation))
    assert fleet.adapters() == {"sql": SQL}
    for _ in range(20):
        placement = placed(fleet, adapter=SQL)
        assert placement.prefill is not None
        assert (placement.prefill.address, placement.decode.address) == ("p7", "d33")


def test_the_last_open_nodes_are_found() -> None:
    fleet = large()
    for number in range(1, 60):
        report(fleet, PREFILL, number, draining=True)
    for prefill, decode in fleet.pairs():
        prefill.take_peer(peer(decode.incarnation))
    chosen = placed(fleet).prefill
    assert chosen is not None
    assert chosen.address == "p0"


def test_a_session_stays_on_its_nodes() -> None:
    fleet = large()
    used = set()
    for _ in range(20):
        placement = placed(fleet, session_id="s")
        assert placement.prefill is not None
        decode = fleet.decoding_node(placement.decode)
        wanted = RoutedRequest(100, LocalPolicy.STRICT, session_id="s")
        prefill = fleet.pick_prefill(decode, wanted, 0.0, placed=placement.prefill.incarnation)
        assert prefill is not None
        used.add((prefill.address, decode.address))
    assert len(used) == 1


@pytest.mark.parametrize("policy", [LocalPolicy.LOCAL, LocalPolicy.ELASTIC])
def test_a_cluster_without_ready_pairs_serves_on_its_decode_nodes(policy: LocalPolicy) -> None:
    fleet = large(policy=policy)
    for prefill in fleet.prefills.values():
        prefill.take_loss("gone")
    placement = fleet.place(RoutedRequest(100, policy), 0.0)
    assert placement is not None
    assert placement.prefill is None


def test_a_removed_node_is_not_chosen() -> None:
    fleet = large()
    gone = fleet.decodes["d0"]
    fleet.remove(DECODE, "d0", 0.0)
    assert gone.open
    for _ in range(200):
        assert placed(fleet).decode.address != "d0"


def test_pairs_of_nodes_that_did_not_choose_each_other_are_not_awaited() -> None:
    fleet = large()
    assert len(fleet.pairs()) < 60 * 60
    assert not fleet.pairs_under_way()
    fleet.prefills["p0"].take_status(status(PREFILL, 10_001), "", 1.0)
    assert fleet.pairs_under_way()


def view(address: str, incarnation: int, *partners: int, **fields: object) -> NodeView:
    node = NodeView(
        address, incarnation, "", True, 1000, 16, 1000, 0, 0, frozenset(partners), costs=COSTS, max_batch_tokens=2048
    )
    return replace(node, **fields)  # type: ignore[arg-type]


def pair_of(*prefills: NodeView, decodes: tuple[NodeView, ...]) -> tuple[str, str]:
    decode, prefill = pick_pair(decodes, prefills, RoutedRequest(900, LocalPolicy.STRICT))
    assert decode is not None
    assert prefill is not None
    return prefill.address, decode.address


def test_a_prompt_goes_where_it_is_cached_and_to_a_partner_of_that_node() -> None:
    decodes = view("d1", 21), view("d2", 22, requests=1, decode_rows=1)
    cached = view("p2", 12, 22, cached_tokens=890)
    assert pair_of(view("p1", 11, 21), cached, decodes=decodes) == ("p2", "d2")
    assert pair_of(view("p1", 11, 21), view("p2", 12, 22), decodes=decodes) == ("p1", "d1")


def test_a_cached_prompt_is_no_reason_for_a_decode_node_without_room_or_much_slower() -> None:
    cached = view("p2", 12, 22, cached_tokens=890)
    full = view("d1", 21), view("d2", 22, room_tokens=10)
    assert pair_of(view("p1", 11, 21), cached, decodes=full) == ("p1", "d1")
    slow = view("d1", 21), view("d2", 22, costs=StepCosts(((1, 0.05), (2048, 0.5))))
    assert pair_of(view("p1", 11, 21), cached, decodes=slow) == ("p1", "d1")


def test_without_costs_the_prompt_goes_where_fewer_tokens_wait() -> None:
    decodes = view("d1", 21, costs=None), view("d2", 22, costs=None)
    busy = view("p1", 11, 21, costs=None, tokens_waiting=5000)
    assert pair_of(busy, view("p2", 12, 22, costs=None), decodes=decodes) == ("p2", "d2")


def test_an_asked_status_counts_if_the_load_is_as_reported() -> None:
    fleet = large()
    node = fleet.decodes["d0"]
    node.note_sent(100)
    later = node_status_pb2.NodeStatus()
    later.CopyFrom(node.status)
    later.requests_running = 1
    node.take_description(later, 1.0)
    assert node.unconfirmed
    later.requests_running = 0
    later.gpus.add(name="H100", power_w=80.0)
    node.take_description(later, 1.0)
    assert not node.unconfirmed
    assert node.view().requests_since == 0


def test_a_repeated_status_confirms_what_was_sent_before_it() -> None:
    fleet = large()
    node = fleet.decodes["d0"]
    node.note_sent(100)
    repeated = node_status_pb2.NodeStatus.FromString(node.status.SerializeToString())
    assert fleet.status_received(DECODE, "d0", repeated, 1.0) == []
    assert not node.unconfirmed
    assert node.view().room_tokens == 100 * 16


def test_a_repeated_status_outweighs_an_answer_about_a_pair() -> None:
    fleet = large()
    node = fleet.prefills["p0"]
    partner = next(iter(node.ready_peers))
    repeated = node_status_pb2.NodeStatus.FromString(node.status.SerializeToString())
    assert not repeated.peers
    fleet.status_received(PREFILL, "p0", repeated, 1.0)
    assert partner not in node.ready_peers


def test_nodes_report_less_often_the_more_there_are() -> None:
    assert (WatchPace(20).interval_s, WatchPace(20).repeat_s) == (0.1, 1.0)
    for num_nodes in (300, 1000, 4000):
        pace = WatchPace(num_nodes)
        assert num_nodes / pace.interval_s <= 2000.1
        assert num_nodes / pace.repeat_s <= 100.1
