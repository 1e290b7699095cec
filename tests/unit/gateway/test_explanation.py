"""What clients read when nodes cannot serve them."""

import pytest

from baton.core.errors import NoNode
from baton.core.types import LocalPolicy
from baton.gateway.request.node_choice import NodeChoice
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import role_name
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, peer, rules, status

CURE = "set BATON_BATCH_INVARIANT (--batch-invariant) alike on both nodes"


def refused(prefills: int, decodes: int, *, theirs: str = "off") -> SmallFleet:
    """A fleet whose nodes have all refused each other."""
    fleet = SmallFleet(prefills, decodes, LocalPolicy.STRICT)
    for prefill in fleet.prefills.values():
        for decode in fleet.decodes.values():
            state = peer(decode.incarnation, node_status_pb2.PEER_PHASE_REFUSED)
            state.mismatches.add(field="batch_invariant", ours="on", theirs=theirs, cure=CURE)
            state.mismatches.add(field="dtype", ours="bfloat16", theirs="float16", cure="start both with one dtype")
            prefill.take_peer(state)
    return fleet


def test_a_client_reads_which_pair_was_refused_for_which_values_and_what_to_change() -> None:
    with pytest.raises(NoNode) as error:
        NodeChoice(rules(LocalPolicy.STRICT), refused(1, 1)).decode_node(64, begun=False, now_s=0.0)
    assert error.value.message == (
        "no node can take the request: node-11 and node-21 cannot work together: "
        "batch_invariant is on and off, dtype is bfloat16 and float16"
    )
    assert error.value.cure == f"{CURE}; start both with one dtype; see `baton status`, and try again"
    assert error.value.retry_after_s is not None


@pytest.mark.parametrize(
    ("policy", "nodes", "lacking"),
    [
        (LocalPolicy.STRICT, (0, 2), "prefill"),
        (LocalPolicy.STRICT, (2, 0), "decode"),
        (LocalPolicy.ELASTIC, (2, 0), "decode"),
    ],
)
def test_a_client_reads_which_role_no_node_has_and_what_to_change(
    policy: LocalPolicy, nodes: tuple[int, int], lacking: str
) -> None:
    fleet = SmallFleet(*nodes, policy)
    with pytest.raises(NoNode) as error:
        NodeChoice(rules(policy), fleet).decode_node(64, begun=False, now_s=0.0)
    (first, role), (second, _) = [(node.name, role_name(node.role)) for node in fleet.nodes()]
    assert error.value.message == (
        f"no node can take the request: no {lacking} node serves, and requests need one; "
        f"{first} is an available {role} node; {second} is an available {role} node"
    )
    assert error.value.cure == (
        f"start a {lacking} node, or make one of several others a {lacking} node: `baton role NAME {lacking}`; "
        "see `baton status`, and try again"
    )


def test_a_prefill_node_that_comes_back_as_a_decode_node_is_named_as_one() -> None:
    fleet = SmallFleet(1, 1, LocalPolicy.STRICT)
    fleet.lose("p1")
    assert fleet.explain().startswith("no prefill node serves")
    back = status(DECODE, 12)
    fleet.status_received(PREFILL, "p1", back, 1.0)
    fleet.status_received(DECODE, "p1", back, 2.0)
    assert fleet.explain() == (
        "no prefill node serves, and requests need one; "
        "node-21 is an available decode node; node-12 is an available decode node"
    )
    assert "`baton role NAME prefill`" in fleet.cure()


def test_a_role_that_requests_can_do_without_is_not_called_lacking() -> None:
    for fleet in (SmallFleet(0, 1, LocalPolicy.ELASTIC), SmallFleet(1, 0, also_decode=True)):
        assert "serves" not in fleet.explain()
        assert fleet.cure() == "see `baton status`, and try again"


def test_no_role_is_called_lacking_while_no_node_is_open() -> None:
    fleet = SmallFleet(1, 0, also_decode=True)
    fleet.lose("p1")
    assert fleet.explain() == "node-11 cannot be used (gone)"
    assert fleet.cure() == "see `baton status`, and try again"


def test_requests_that_need_a_prefill_node_say_so_where_others_need_none() -> None:
    fleet = SmallFleet(0, 1)
    assert "serves" not in fleet.explain()
    assert (
        fleet.explain(PREFILL) == "no prefill node serves, and requests need one; node-21 is an available decode node"
    )
    assert "`baton role NAME prefill`" in fleet.cure(PREFILL)
    fleet = SmallFleet(1, 0)
    assert "serves" not in fleet.explain(PREFILL)


def test_refusals_of_nodes_that_are_gone_are_left_out() -> None:
    fleet = refused(2, 1)
    fleet.lose("p1")
    assert "node-11 and" not in fleet.explain()
    assert "node-12 and node-21 cannot work together" in fleet.explain()
    fleet.lose("p2")
    assert fleet.explain().count("cannot be used (gone)") == 2
    assert fleet.cure() == "see `baton status`, and try again"


def test_refusals_of_a_node_that_has_another_pair_are_left_out() -> None:
    fleet = refused(1, 2)
    fleet.prefills["p1"].take_peer(peer(22))
    assert "cannot work together" not in fleet.explain()
    assert fleet.cure() == "see `baton status`, and try again"
    fleet.lose("d2")
    assert "node-11 and node-21 cannot work together" in fleet.explain()


def test_large_fleets_and_long_values_are_explained_in_short() -> None:
    fleet = refused(8, 8, theirs="x" * 1000)
    assert fleet.explain().count("cannot work together") == 8
    assert fleet.explain().endswith("; 56 more nodes or pairs like these")
    assert len(fleet.explain()) < 2000
    assert fleet.cure().count(CURE) == 1


def test_what_to_change_is_left_out_with_the_pairs_while_a_node_loads() -> None:
    fleet = refused(1, 2)
    assert CURE in fleet.cure()
    info = node_status_pb2.NodeInfo(incarnation=22, name="node-22", role=node_status_pb2.ROLE_DECODE)
    loading = node_status_pb2.Loading(stage="loading weights")
    fleet.decodes["d2"].take_loading(node_status_pb2.NodeStatus(info=info, loading=loading))
    assert fleet.explain() == "node-22 is loading weights"
    assert fleet.cure() == "see `baton status`, and try again"


def test_clients_read_that_a_link_is_slow_and_nothing_about_the_machines() -> None:
    fleet = SmallFleet(1, 1, LocalPolicy.STRICT)
    state = peer(21, node_status_pb2.PEER_PHASE_REFUSED)
    state.mismatches.add(field="link", ours="0.2 GB/s", theirs="at least 0.5 GB/s", cure="process 1 needs hostPID")
    fleet.prefills["p1"].take_peer(state)
    assert fleet.explain() == "node-11 and node-21 cannot work together: link is 0.2 GB/s and at least 0.5 GB/s"
    assert fleet.cure() == "see `baton status`, and try again"
