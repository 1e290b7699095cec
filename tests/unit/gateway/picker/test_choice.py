"""Which gateway a request goes to."""

import pytest

from baton.core.errors import NoNode, Overloaded
from baton.gateway.picker.choice import GatewayChoice, PickRequest, Report

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:8000"
ALL = frozenset({A, B, C})
KEYS = [str(number).encode() for number in range(200)]


def choice(*addresses: str, fallbacks: int = 0, running: float = 0.0) -> GatewayChoice:
    """Of these gateways, all ready."""
    made = GatewayChoice(stale_s=3.0, fallbacks=fallbacks, shed_waiting=4)
    made.set_addresses(frozenset(addresses))
    for each in addresses:
        made.report(each, report(running=running))
    return made


def report(*, at_s: float = 0.0, ready: bool = True, running: float = 0.0, waiting: float = 0.0) -> Report:
    return Report(at_s, ready, running, waiting)


def first(of: GatewayChoice, wanted: PickRequest = PickRequest(), now_s: float = 1.0) -> str:  # noqa: B008  frozen
    return of.pick(wanted, now_s).addresses[0]


def test_a_request_without_a_key_goes_where_the_load_is_least() -> None:
    made = choice(A, B, C)
    made.report(A, report(running=3))
    made.report(B, report(running=1))
    made.report(C, report(running=1, waiting=4))
    assert first(made) == B


def test_requests_that_were_sent_since_the_report_count() -> None:
    made = choice(A, B)
    assert {first(made), first(made)} == {A, B}
    assert sorted(first(made) for _ in range(100)).count(A) == 50


def test_a_later_report_counts_what_was_sent_before_it() -> None:
    made = choice(A, B)
    for _ in range(10):
        first(made, now_s=1.0)
    made.report(A, report(at_s=2.0, running=5))
    made.report(B, report(at_s=2.0, running=0))
    assert [first(made, now_s=2.0) for _ in range(5)] == [B] * 5


def test_a_request_counts_by_its_size() -> None:
    made = choice(A, B)
    first(made, PickRequest(tokens=1000))
    large = first(made, PickRequest(tokens=4000))
    assert {first(made, PickRequest(tokens=1000)) for _ in range(2)} == {A, B} - {large}


def test_a_conversation_stays_with_its_gateway() -> None:
    made = choice(A, B, C)
    picked = {key: first(made, PickRequest(key), now_s=0.0) for key in KEYS[:6]}
    for at_s in (1.0, 2.0, 3.0):
        for each in ALL:
            made.report(each, report(at_s=at_s))
        assert {key: first(made, PickRequest(key), now_s=at_s) for key in KEYS[:6]} == picked


def test_conversations_are_shared_out() -> None:
    found = [first(choice(A, B, C), PickRequest(key)) for key in KEYS]
    assert all(found.count(each) > len(KEYS) / 5 for each in ALL)


def test_a_new_gateway_takes_conversations_only_for_itself() -> None:
    moved = {
        (before, after)
        for key in KEYS
        if (before := first(choice(A, B), PickRequest(key))) != (after := first(choice(A, B, C), PickRequest(key)))
    }
    assert moved == {(A, C), (B, C)}


def test_a_popular_prompt_is_spread_once_its_gateway_has_more_than_its_share() -> None:
    made = choice(A, B)
    picked = [made.pick(PickRequest(b"popular"), 1.0) for _ in range(400)]
    found = [each.addresses[0] for each in picked]
    assert picked[0].affinity == "kept"
    assert "spilled" in {each.affinity for each in picked}
    assert max(found.count(A), found.count(B)) <= 0.625 * 400 + 1


@pytest.mark.parametrize(
    "state",
    [
        report(at_s=10.0, ready=False),
        report(at_s=5.0),  # longer ago than stale_s
    ],
)
def test_a_gateway_that_is_not_ready_gets_nothing(state: Report) -> None:
    made = choice(A, B)
    made.report(A, state)
    made.report(B, report(at_s=10.0, running=50))
    assert {first(made, PickRequest(key), now_s=10.0) for key in [None, *KEYS]} == {B}
    assert made.count(10.0) == (1, 1)


def test_a_lost_gateway_comes_back_with_its_next_report() -> None:
    made = choice(A)
    made.lost(A)
    with pytest.raises(NoNode, match="none of the 1"):
        made.pick(PickRequest(), 1.0)
    made.report(A, report(at_s=1.0))
    assert first(made) == A


def test_a_gateway_that_a_request_did_not_reach_must_answer_first() -> None:
    made = choice(A, B)
    made.doubt(A, 1.0)
    made.report(A, report(at_s=0.9))
    assert {first(made) for _ in range(4)} == {B}
    made.report(A, report(at_s=1.1))
    assert first(made, now_s=1.2) == A


def test_a_gateway_that_nobody_has_heard_of_yet_gets_nothing() -> None:
    made = GatewayChoice(stale_s=3.0, fallbacks=0, shed_waiting=1)
    with pytest.raises(NoNode):
        made.pick(PickRequest(), 0.0)
    made.set_addresses({A})
    with pytest.raises(NoNode):
        made.pick(PickRequest(), 0.0)


def test_fallbacks_follow_and_are_ready() -> None:
    made = choice(A, B, C, fallbacks=5)
    assert set(made.pick(PickRequest(b"key"), 1.0).addresses) == ALL
    made.lost(C)
    assert set(made.pick(PickRequest(), 1.0).addresses) == {A, B}


@pytest.mark.parametrize("subset", [{A}, {"10.0.0.1"}, {A, "10.0.0.9:8000"}])
def test_a_subset_names_gateways_or_hosts(subset: set[str]) -> None:
    made = choice(A, B, C, fallbacks=2)
    assert made.pick(PickRequest(subset=frozenset(subset)), 1.0).addresses == (A,)


@pytest.mark.parametrize("host", ["[fd00::3]:8000", "[fd00::3]", "fd00::3"])
def test_a_subset_may_name_hosts_of_ipv6(host: str) -> None:
    assert first(choice(A, B, C), PickRequest(subset=frozenset({host}))) == C


@pytest.mark.parametrize("subset", [set(), {"10.0.0.9:8000"}, {"10.0.0.1:80"}])
def test_a_subset_without_a_gateway_is_refused(subset: set[str]) -> None:
    with pytest.raises(NoNode):
        choice(A).pick(PickRequest(subset=frozenset(subset)), 1.0)


def test_sheddable_requests_are_refused_once_requests_wait_everywhere() -> None:
    made = choice(A, B)
    made.report(A, report(waiting=4))
    assert first(made, PickRequest(sheddable=True)) == B
    made.report(B, report(waiting=9))
    with pytest.raises(Overloaded):
        made.pick(PickRequest(sheddable=True), 1.0)
    assert first(made) == A


def test_a_request_that_claims_to_be_huge_keeps_nobody_away_for_long() -> None:
    made = choice(A, B)
    for _ in range(2):
        first(made, PickRequest(tokens=1))
    large = first(made, PickRequest(tokens=1 << 60))
    assert [first(made, PickRequest(tokens=1)) for _ in range(30)].count(large) > 5
