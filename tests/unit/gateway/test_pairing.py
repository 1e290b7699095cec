"""Which pairs are requested, and when they are requested again."""

from baton.core.errors import NoNode
from baton.gateway.fleet.node_table import LogLine
from baton.gateway.request.pairing import ConnectNodes, Pairing, PairingCommand
from baton.protos.v1 import node_status_pb2
from tests.unit.gateway.fleets import PREFILL, SmallFleet, peer, status

PAIR = (11, 21)
CONNECTING = node_status_pb2.PeerState(incarnation=21, phase=node_status_pb2.PEER_PHASE_CONNECTING, detail="dialling")


def unpaired(prefills: int = 1, decodes: int = 1) -> SmallFleet:
    """Nodes without pairs."""
    fleet = SmallFleet(prefills, decodes)
    for node in fleet.prefills.values():
        node.peers.clear()
    return fleet


def pairing(prefills: int = 1, decodes: int = 1) -> Pairing:
    return Pairing(unpaired(prefills, decodes), link_retry_s=60.0)


def connects(commands: list[PairingCommand]) -> list[ConnectNodes]:
    return [command for command in commands if isinstance(command, ConnectNodes)]


def refused(*fields: str) -> node_status_pb2.PeerState:
    state = peer(21, node_status_pb2.PEER_PHASE_REFUSED)
    for field in fields:
        state.mismatches.add(field=field, ours="1", theirs="2", cure="make them equal")
    return state


def test_every_pair_is_asked_for_once_at_a_time() -> None:
    pairs = pairing(2, 2)
    first = connects(pairs.check(0.0))
    assert {command.pair for command in first} == {(11, 21), (11, 22), (12, 21), (12, 22)}
    assert first[0].prefill_address == "p1"
    assert pairs.check(10.0) == []
    assert not pairs.settled()


def test_a_pair_that_is_not_ready_is_requested_again_with_growing_pauses() -> None:
    pairs = pairing()
    now_s = 0.0
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        assert connects(pairs.check(now_s))
        assert pairs.answered(PAIR, CONNECTING, now_s) == [LogLine("node-11 cannot connect to node-21 yet: dialling")]
        assert pairs.check(now_s + 0.9 * pause_s) == []
        now_s += 1.001 * pause_s


def test_a_prefill_node_that_cannot_be_asked_is_asked_again() -> None:
    pairs = pairing()
    pairs.check(0.0)
    (line,) = pairs.failed(PAIR, NoNode("connection refused"), 1.0)
    assert line.text == "node-11 could not be asked to connect to node-21: connection refused"
    assert connects(pairs.check(2.0))


def test_a_ready_pair_is_logged_once_and_not_asked_for() -> None:
    pairs = pairing()
    pairs.fleet.prefills["p1"].take_peer(peer(21))
    assert pairs.check(0.0) == [LogLine("node-11 and node-21 are paired over cma at 0.0 GB/s")]
    assert pairs.check(1.0) == []
    assert pairs.settled()


def test_a_status_that_the_node_sent_before_its_answer_does_not_end_the_pair_but_the_next_one_does() -> None:
    """Both arrive on streams of their own."""
    pairs = pairing()
    prefill = pairs.fleet.prefills["p1"]
    prefill.take_peer(peer(21))
    prefill.take_status(status(PREFILL, 11, CONNECTING), "", 1.0)
    assert pairs.settled()
    assert prefill.view().ready_peers == {21}
    same = status(PREFILL, 11, CONNECTING)
    assert not prefill.confirms(same, "")
    prefill.take_status(same, "", 2.0)
    assert not pairs.settled()
    assert prefill.view().ready_peers == set()


def test_a_refusal_is_logged_with_every_reason_and_final() -> None:
    pairs = pairing()
    pairs.fleet.prefills["p1"].take_peer(refused("kind", "link"))
    texts = [command.text for command in pairs.check(0.0) if isinstance(command, LogLine)]
    assert texts == [
        "node-11 and node-21 cannot work together:",
        "  kind: 1 and 2; make them equal",
        "  link: 1 and 2; make them equal",
    ]
    assert pairs.check(1000.0) == []


def test_a_pair_refused_for_its_link_alone_is_measured_again() -> None:
    pairs = pairing()
    pairs.fleet.prefills["p1"].take_peer(refused("link"))
    assert connects(pairs.check(0.0))
    pairs.answered(PAIR, refused("link"), 1.0)
    assert pairs.check(60.0) == []
    assert connects(pairs.check(61.0))


def test_a_restarted_node_is_another_pair() -> None:
    fleet = unpaired()
    pairs = Pairing(fleet, link_retry_s=60.0)
    pairs.check(0.0)
    fleet.connect("d1", 1.0, restarts=1)
    assert [command.pair for command in connects(pairs.check(1.0))] == [(11, 121)]
    assert pairs.answered(PAIR, CONNECTING, 2.0) == []
    assert pairs.failed(PAIR, NoNode("gone"), 2.0) == []


def test_a_lost_node_is_asked_for_nothing() -> None:
    fleet = unpaired()
    pairs = Pairing(fleet, link_retry_s=60.0)
    fleet.lose("d1")
    assert pairs.check(0.0) == []
    assert pairs.settled()


def test_a_refusal_counts_after_the_node_has_forgotten_it() -> None:
    pairs = pairing()
    prefill = pairs.fleet.prefills["p1"]
    prefill.take_peer(refused("kind"))
    pairs.check(0.0)
    prefill.take_status(status(PREFILL, 11), "", 1.0)  # a node lists only its latest refused peers
    assert not prefill.peers
    assert pairs.check(1.0) == []
    assert pairs.settled()


def test_in_a_large_cluster_a_gateway_asks_for_some_pairs_at_a_time() -> None:
    pairs = pairing(40, 40)
    chosen = {(prefill.incarnation, decode.incarnation) for prefill, decode in pairs.fleet.pairs()}
    asked: set[tuple[int, int]] = set()
    now_s = 0.0
    while not pairs.settled():
        commands = connects(pairs.check(now_s))
        assert 0 < len(commands) <= 256
        for command in commands:
            assert command.pair not in asked
            asked.add(command.pair)
            state = peer(command.pair[1])
            pairs.fleet.prefills[command.prefill_address].take_peer(state)
            pairs.answered(command.pair, state, now_s)
        now_s += 0.2
    assert asked == chosen
    assert len(chosen) < 40 * 40 / 2


def test_a_gateway_does_not_ask_for_pairs_that_other_gateways_have_made() -> None:
    pairs = pairing(40, 40)
    first = connects(pairs.check(0.0))
    for prefill, decode in pairs.fleet.pairs():
        prefill.take_peer(peer(decode.incarnation))
    for command in first:
        pairs.answered(command.pair, peer(command.pair[1]), 0.1)
    assert connects(pairs.check(10.0)) == []
    assert pairs.settled()


def test_a_lost_pair_is_asked_for_again_and_others_are_left_alone() -> None:
    fleet = unpaired(1, 2)
    pairs = Pairing(fleet, link_retry_s=60.0)
    prefill = fleet.prefills["p1"]
    for number in (21, 22):
        prefill.take_peer(peer(number))
    assert connects(pairs.check(0.0)) == []
    prefill.take_status(status(PREFILL, 11, peer(21, node_status_pb2.PEER_PHASE_LOST), peer(22)), "", 1.0)
    assert [command.pair for command in connects(pairs.check(1.0))] == [PAIR]
