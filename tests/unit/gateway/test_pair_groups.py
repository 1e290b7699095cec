"""Which nodes are paired where nodes report their topology: near ones first, and others where a group has too few."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.core.limits import TOPOLOGY_LABELS_MAX
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.pair_choice import ALL_UP_TO, PARTNERS, Candidate, choose_pairs
from baton.gateway.fleet.topology import Labels, shared_levels
from baton.protos.v1 import node_status_pb2
from baton.settings.node_config import PrefillSettings
from baton.settings.topology import read_topology
from tests.unit.gateway.fleets import PREFILL, status

Pairs = set[tuple[Candidate, Candidate]]
Group = tuple[Labels, int]  # labels and number of nodes

ZONES = [("zone=a",), ("zone=b",), ("zone=c",)]
HOSTS = [(f"zone={number % 3}", f"host={number}") for number in range(30)]


def nodes(role: int, *groups: Group) -> list[Candidate]:
    labels = [labels for labels, number in groups for _ in range(number)]
    random = Random(role)
    return [
        Candidate(f"10.{role}.0.{number}:7001", random.getrandbits(64), "r", open=True, reachable=True, topology=where)
        for number, where in enumerate(labels)
    ]


def pairs(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Pairs:
    return {(prefills[row], decodes[column]) for row, column in choose_pairs(prefills, decodes)}


def partners(chosen: Pairs) -> Counter[Candidate]:
    return Counter(node for pair in chosen for node in pair)


def near_share(chosen: Pairs) -> float:
    return sum(prefill.topology == decode.topology for prefill, decode in chosen) / len(chosen)


def known(pairs: Pairs) -> set[tuple[str, str]]:
    return {(prefill.address, decode.address) for prefill, decode in pairs}


def test_almost_all_partners_are_in_the_zone_where_it_has_enough_of_both_roles() -> None:
    groups = [(zone, number) for zone, number in zip(ZONES, (60, 80, 100), strict=True)]
    chosen = pairs(nodes(1, *groups), nodes(2, *groups))
    assert near_share(chosen) >= 0.95
    assert min(partners(chosen).values()) >= PARTNERS
    assert max(partners(chosen).values()) <= 3 * PARTNERS


def test_all_pairs_of_a_host_are_chosen_and_the_other_partners_are_in_its_zone() -> None:
    groups = [(host, 4) for host in HOSTS]
    prefills, decodes = nodes(1, *groups), nodes(2, *groups)
    chosen = pairs(prefills, decodes)
    of_hosts = {(one, other) for one in prefills for other in decodes if one.topology == other.topology}
    assert len(of_hosts) == 4 * 4 * len(HOSTS)
    assert of_hosts <= chosen
    shared = [shared_levels([one.topology], [other.topology])[0, 0] for one, other in chosen]
    assert min(shared) == 1  # a zone
    assert min(partners(chosen).values()) == PARTNERS


def test_equal_names_in_different_zones_are_different_groups() -> None:
    here, there = ("zone=a", "rack=1"), ("zone=b", "rack=1")
    assert shared_levels([here], [there])[0, 0] == 0
    assert shared_levels([here], [("zone=a", "rack=2")])[0, 0] == 1
    assert shared_levels([here], [here])[0, 0] == 2
    assert shared_levels([()], [()])[0, 0] == 0


def test_a_few_nodes_of_one_role_in_a_zone_are_not_everybodys_partners() -> None:
    prefills = nodes(1, (ZONES[0], 2), (ZONES[1], 98))
    decodes = nodes(2, (ZONES[0], 50), (ZONES[1], 50))
    counts = partners(pairs(prefills, decodes))
    assert max(counts[node] for node in prefills[:2]) <= 4 * PARTNERS
    assert min(counts[node] for node in decodes) >= PARTNERS


def test_a_zone_without_one_role_has_partners_in_other_zones() -> None:
    chosen = pairs(nodes(1, (ZONES[0], 50)), nodes(2, (ZONES[1], 25), ((), 25)))
    assert len(partners(chosen)) == 100
    assert min(partners(chosen).values()) >= PARTNERS


def test_a_small_cluster_is_paired_with_all_wherever_its_nodes_are() -> None:
    prefills, decodes = nodes(1, (ZONES[0], ALL_UP_TO)), nodes(2, (ZONES[1], 20), (ZONES[0], 20))
    assert len(pairs(prefills, decodes)) == ALL_UP_TO * 40


def test_one_node_with_a_label_changes_no_pair_of_the_others() -> None:
    plain = pairs(nodes(1, ((), 100)), nodes(2, ((), 100)))
    labelled = pairs(nodes(1, (ZONES[0], 1), ((), 99)), nodes(2, ((), 100)))
    assert known(labelled) == known(plain)


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_node_that_leaves_its_group_changes_few_pairs_of_the_others(leaving: int) -> None:
    groups = [(zone, 40) for zone in ZONES]
    both = nodes(1, *groups), nodes(2, *groups)
    before, gone = pairs(*both), both[leaving][50]
    both[leaving].remove(gone)
    after = pairs(*both)
    kept = {pair for pair in before if gone not in pair}
    assert len(kept - after) <= PARTNERS
    assert len(after - kept) <= 2 * PARTNERS


@pytest.mark.parametrize("step", [7, 30])
def test_a_cluster_that_starts_makes_few_pairs_that_it_would_not_choose_in_the_end(step: int) -> None:
    groups = [(zone, 40) for zone in ZONES]
    prefills, decodes = nodes(1, *groups), nodes(2, *groups)
    order = list(range(len(decodes)))
    Random(3).shuffle(order)
    made: set[tuple[str, str]] = set()
    for number in range(0, len(order) + 1, step):
        there = set(order[:number])
        listed = [
            each if number in there else each._replace(incarnation=0, revision="", reachable=False, topology=None)
            for number, each in enumerate(decodes)
        ]
        made |= known(pairs(prefills, listed))
    final = known(pairs(prefills, decodes))
    assert len(made - final) <= len(final) / 10


GROUPS = st.lists(st.tuples(st.sampled_from([(), *ZONES, *HOSTS[:6]]), st.integers(1, 40)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(GROUPS, GROUPS, st.sets(st.integers(0, 50)))
def test_every_node_has_partners_however_the_groups_are_made_up(
    of_prefills: list[Group], of_decodes: list[Group], closed: set[int]
) -> None:
    prefills, decodes = nodes(1, *of_prefills), nodes(2, *of_decodes)
    assume(min(len(prefills), len(decodes)) > ALL_UP_TO)
    decodes = [each._replace(open=number not in closed) for number, each in enumerate(decodes)]
    open_decodes = [each for each in decodes if each.open]
    chosen = pairs(prefills, decodes)
    counts = partners(chosen)
    assert all(decode.open for _, decode in chosen)
    assert min((counts[node] for node in prefills), default=0) >= min(PARTNERS, len(open_decodes))
    assert min((counts[node] for node in open_decodes), default=PARTNERS) >= PARTNERS
    assert len(chosen) <= PARTNERS * (len(prefills) + len(decodes))
    assert known(pairs(prefills[::-1], sorted(decodes, key=str))) == known(chosen)


def test_a_nodes_topology_is_unknown_until_its_first_status_and_known_while_it_loads() -> None:
    node = FleetNode(PREFILL, "p1", PREFILL, count())
    assert node.candidate.topology is None
    info = node_status_pb2.NodeInfo(name="p1", topology=ZONES[0])
    node.take_loading(node_status_pb2.NodeStatus(info=info, loading=node_status_pb2.Loading(stage="loading weights")))
    assert node.candidate.topology == ZONES[0]
    serving = status(PREFILL, 11)
    serving.info.topology.extend(f"level{number}=x" for number in range(100))
    node.take_status(serving, "", 0.0)
    assert node.candidate.topology == tuple(f"level{number}=x" for number in range(TOPOLOGY_LABELS_MAX))


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ("", ()),
        ("zone=a,host=h1", ("zone=a", "host=h1")),
        (" zone = a , host=h1,", ("zone=a", "host=h1")),
        ("zone=,host=h1", ("host=h1",)),
        ("topology.kubernetes.io/zone=eu-1a", ("topology.kubernetes.io/zone=eu-1a",)),
        (",".join(f"level{number}={'x' * (number == 8)}" for number in range(9)), ("level8=x",)),
    ],
)
def test_labels_are_read_and_those_without_a_value_are_left_out(given: str, labels: Labels) -> None:
    assert read_topology(given) == labels
    assert PrefillSettings.model_validate({"topology": given}).topology_labels == labels


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("zone", "'zone' is not a label; allowed: name=value"),
        ("=a", "'=a' is not a label"),
        ("zone=\x1b", "is not a label"),
        (f"zone={'a' * 5000}", "is not a label; allowed: name=value of at most 256 printable characters"),
        ("zone=a,zone=b", "'zone' is named twice"),
        (",".join(f"level{number}=x" for number in range(9)), "9 labels are too many; allowed: at most 8"),
    ],
)
def test_a_wrong_label_is_refused_with_what_is_allowed(given: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        PrefillSettings.model_validate({"topology": given})
