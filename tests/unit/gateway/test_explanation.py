"""What clients read when nodes cannot serve them."""

import pytest

from baton.core.errors import NoNode
from baton.core.types import LocalPolicy
from baton.gateway.request.node_choice import NodeChoice
from baton.protos.v1 import node_status_pb2
from tests.unit.gateway.fleets import SmallFleet, peer, rules

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
