"""Which nodes are paired before traffic: all with all in small clusters, a few partners each in large ones."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from baton.core.types import AdapterRef
from baton.gateway.fleet.pair_choice import ALL_UP_TO, PARTNERS, Candidate, choose_pairs

SQL = AdapterRef("sql", "1" * 32)


def nodes(count: int, seed: int, revision: str = "r") -> list[Candidate]:
    random = Random(seed)
    return [
        Candidate(f"10.{seed}.0.{number}:7001", random.getrandbits(64), revision, open=True, reachable=True)
        for number in range(count)
    ]


def pairs(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> set[tuple[int, int]]:
    """The chosen pairs, as incarnations."""
    chosen = choose_pairs(prefills, decodes)
    return {(prefills[row].incarnation, decodes[column].incarnation) for row, column in chosen}


@pytest.mark.parametrize(("prefills", "decodes"), [(0, 3), (1, 1), (10, 10), (ALL_UP_TO, 40), (40, ALL_UP_TO)])
def test_in_a_small_cluster_all_are_paired_with_all(prefills: int, decodes: int) -> None:
    closed = [each._replace(open=False, revision=f"{number}") for number, each in enumerate(nodes(decodes, 2))]
    assert len(choose_pairs(nodes(prefills, 1), closed)) == prefills * decodes


@pytest.mark.parametrize(("prefills", "decodes"), [(17, 17), (60, 200), (300, 300)])
def test_in_a_large_cluster_every_node_has_partners_and_none_has_many(prefills: int, decodes: int) -> None:
    chosen = pairs(nodes(prefills, 1), nodes(decodes, 2))
    of_prefill, of_decode = Counter(prefill for prefill, _ in chosen), Counter(decode for _, decode in chosen)
    assert (len(of_prefill), len(of_decode)) == (prefills, decodes)
    assert min([*of_prefill.values(), *of_decode.values()]) >= PARTNERS
    fewer = min(prefills, decodes)
    assert len(chosen) <= PARTNERS * (prefills + decodes)
    assert max([*of_prefill.values(), *of_decode.values()]) <= 4 * PARTNERS * max(prefills, decodes) / fewer


def test_all_gateways_choose_alike_in_whatever_order_they_list_the_nodes() -> None:
    prefills, decodes = nodes(50, 1), nodes(50, 2)
    assert pairs(prefills, decodes) == pairs(prefills[::-1], sorted(decodes))


def test_a_node_that_leaves_changes_few_pairs_of_the_others() -> None:
    prefills, decodes = nodes(100, 1), nodes(100, 2)
    before, gone = pairs(prefills, decodes), decodes[0].incarnation
    after = pairs(prefills, decodes[1:])
    kept = {pair for pair in before if pair[1] != gone}
    assert kept <= after
    assert len(after - kept) <= 2 * PARTNERS


def test_partners_have_the_same_revision_take_requests_and_never_refused() -> None:
    prefills = nodes(40, 1, "old") + nodes(40, 2, "new")
    decodes = nodes(40, 3, "old") + nodes(40, 4, "new")
    decodes[0] = decodes[0]._replace(open=False)
    refuses = frozenset(each.incarnation for each in decodes[41:60])
    prefills[40] = prefills[40]._replace(refused=refuses)
    chosen = pairs(prefills, decodes)
    revisions = {each.incarnation: each.revision for each in (*prefills, *decodes)}
    assert all(revisions[prefill] == revisions[decode] for prefill, decode in chosen)
    assert decodes[0].incarnation not in {decode for _, decode in chosen}
    of_refusing = {decode for prefill, decode in chosen if prefill == prefills[40].incarnation}
    assert len(of_refusing) >= PARTNERS
    assert not of_refusing & refuses


def test_nodes_with_a_rare_adapter_are_paired_with_each_other() -> None:
    prefills, decodes = nodes(100, 1), nodes(100, 2)
    for candidates in (prefills, decodes):
        for number in (3, 50):
            candidates[number] = candidates[number]._replace(adapters=frozenset({SQL}))
    rare = {(prefills[one].incarnation, decodes[other].incarnation) for one in (3, 50) for other in (3, 50)}
    assert rare <= pairs(prefills, decodes)


def test_a_cluster_that_starts_makes_no_pairs_that_it_would_not_choose_in_the_end() -> None:
    prefills, decodes = nodes(100, 1), nodes(100, 2)
    unknown = [each._replace(incarnation=0, revision="", reachable=False) for each in decodes]
    made: set[tuple[int, int]] = set()
    for known in range(0, 101, 10):
        made |= pairs(prefills, decodes[:known] + unknown[known:])
    final = pairs(prefills, decodes)
    assert final <= made
    assert len(made - final) <= 10


def test_nodes_that_are_not_reachable_are_not_paired_and_the_others_have_partners() -> None:
    prefills, decodes = nodes(60, 1), nodes(60, 2)
    there = [each._replace(reachable=number < 5) for number, each in enumerate(decodes)]
    chosen = pairs(prefills, there)
    assert {decode for _, decode in chosen} == {each.incarnation for each in decodes[:5]}
    assert min(Counter(decode for _, decode in chosen).values()) >= PARTNERS
    both = [each._replace(reachable=number < 5) for number, each in enumerate(prefills)]
    chosen = pairs(both, there)
    assert {decode for _, decode in chosen} == {each.incarnation for each in decodes[:5]}
