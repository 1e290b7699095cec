"""When a node is moved to the other role, and when not."""

from dataclasses import replace
from itertools import pairwise

import pytest

from baton.gateway.request.balance import Balance, BalanceRules, Load, Move, loads_of
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet

RULES = BalanceRules(backlog_s=2.0, hold_s=30.0, cool_down_s=120.0)


def cluster(prefill: float, decode: float, *, prefills: int = 2, decodes: int = 2) -> list[Load]:
    """Nodes with the same load for all of one role; 1 is as much as they should have."""
    return [Load(f"p{number}", 10 + number, PREFILL, prefill, prefill) for number in range(1, prefills + 1)] + [
        Load(f"d{number}", 20 + number, DECODE, decode, decode) for number in range(1, decodes + 1)
    ]


def run(balance: Balance, loads: list[Load], *, start: int, stop: int) -> list[tuple[int, Move]]:
    """The moves, one look a second."""
    moves = ((now, balance.decide(loads, now)) for now in range(start, stop))
    return [(now, move) for now, move in moves if move is not None]


def test_a_role_that_has_needed_nodes_for_long_gets_one_that_the_other_can_spare() -> None:
    (first, *_) = run(Balance(RULES), cluster(1.5, 0.1), start=0, stop=200)
    assert (first[0], first[1].address, first[1].role) == (150, "d1", PREFILL), "after the cool-down and the hold"
    (first, *_) = run(Balance(RULES), cluster(0.1, 1.5), start=0, stop=200)
    assert (first[1].address, first[1].role) == ("p1", DECODE)


@pytest.mark.parametrize(
    "loads",
    [
        cluster(0.9, 0.0),
        cluster(5.0, 0.3),  # the one that is left would have 0.6
        cluster(5.0, 0.0, decodes=1),
        cluster(0.0, 5.0, prefills=1),
        cluster(0.0, 0.0, prefills=0),
        cluster(5.0, 5.0),
        [],
    ],
)
def test_nobody_is_moved_without_need_or_from_where_it_is_needed_or_the_last(loads: list[Load]) -> None:
    assert run(Balance(RULES), loads, start=0, stop=1000) == []


def test_load_that_goes_up_and_down_faster_than_the_hold_moves_nobody() -> None:
    balance = Balance(RULES)
    for now in range(2000):
        high = now // 20 % 2 == 0
        assert balance.decide(cluster(3.0 if high else 0.0, 0.0), now) is None


def test_load_that_changes_sides_slowly_moves_a_node_once_in_a_cool_down() -> None:
    balance, prefills, moves = Balance(RULES), 2, list[int]()
    for now in range(4000):
        prefill_side = now // 60 % 2 == 0  # for a minute each
        busy, idle = 3.0, 0.0
        loads = cluster(
            busy if prefill_side else idle, idle if prefill_side else busy, prefills=prefills, decodes=4 - prefills
        )
        if (move := balance.decide(loads, now)) is not None:
            prefills += 1 if move.role == PREFILL else -1
            moves.append(now)
        assert prefills in (1, 2, 3)
    gaps = [later - earlier for earlier, later in pairwise(moves)]
    assert min(gaps) >= RULES.cool_down_s + RULES.hold_s


def test_after_nodes_came_or_went_or_switched_there_is_a_pause() -> None:
    balance = Balance(RULES)
    assert run(balance, cluster(3.0, 0.0), start=0, stop=150) == []
    (first, *_) = run(balance, cluster(3.0, 0.0, decodes=3), start=150, stop=400)
    assert first[0] == 300
    balance.failed(400.0)
    (first, *_) = run(balance, cluster(3.0, 0.0, decodes=3), start=401, stop=700)
    assert first[0] == 550


def test_a_node_goes_back_to_the_role_of_its_list_before_others_leave_theirs() -> None:
    loads = cluster(3.0, 0.0, decodes=3)
    loads[-1] = replace(loads[-1], in_listed_role=False)
    (first, *_) = run(Balance(RULES), loads, start=0, stop=200)
    assert first[1].address == "d3"


def test_a_node_that_cannot_switch_is_left_out() -> None:
    rules = BalanceRules(backlog_s=2.0, hold_s=0.0, cool_down_s=0.0)
    chosen = Balance(rules).decide(cluster(3.0, 0.0), 1.0, fixed={21})
    assert chosen is not None
    assert chosen.address == "d2"
    assert Balance(rules).decide(cluster(3.0, 0.0), 1.0, fixed={21, 22}) is None


def test_the_load_of_a_node_is_its_backlog_and_what_it_decodes() -> None:
    fleet = SmallFleet(1, 2)
    fleet.lose("d2")
    prefill, decode = fleet.prefills["p1"].status, fleet.decodes["d1"].status
    prefill.backlog_s, prefill.decode_rows, prefill.max_batch_requests = 1.0, 64, 80
    decode.blocks_total, decode.requests_running, decode.requests_waiting, decode.max_batch_requests = 200, 10, 6, 20
    decode.backlog_s = 4.0
    first, second = loads_of(fleet.nodes(), RULES)
    assert [first.need, first.used] == pytest.approx([0.5, 1.0])
    assert [second.need, second.used] == pytest.approx([1.0, 2.0])
    assert first.in_listed_role
    assert second.in_listed_role
