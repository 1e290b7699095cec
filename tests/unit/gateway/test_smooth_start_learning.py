"""What a gateway learns from hand-overs whose first token waits, and what others count of the wait."""

import pytest

from baton.gateway.core.events import Started, TimePassed, TokensCame
from baton.gateway.fleet.route_overheads import LearnedOverheads
from baton.protos.internal.v1 import decode_pb2
from tests.unit.gateway.fleets import DECODE, PREFILL, peer, status
from tests.unit.gateway.held_start import CAME_S, GONE, STEP_S, called, held, learned_s, taught
from tests.unit.gateway.served import (
    LENGTH,
    SCHEDULED,
    SENT,
    Served,
    accepted,
    first_token,
    reserved,
    token,
)

# ---- what is learned


def second_after(served: Served, delay_s: float) -> float:
    """How much the learned delay changes with a second token that comes so long after the first."""
    before_s = learned_s(served)
    served.decode(decode_pb2.Admitted(), token(1), after_s=delay_s)
    return learned_s(served) - before_s


def test_the_delay_counts_from_the_arrival_of_the_first_token() -> None:
    served = held()
    assert served.machine.deadline_s is not None
    hold_s = served.machine.deadline_s - served.now_s
    served.handle(TimePassed(), after_s=hold_s)
    # Since it was passed on, less time has passed than was learned; since it came, more.
    assert second_after(served, 0.0175 - hold_s / 2) > 0
    assert second_after(held(), 0.012) < 0


def test_the_delay_counts_to_the_arrival_of_the_second_token_although_it_had_to_wait_for_its_turn() -> None:
    served = held()
    before_s = learned_s(served)
    served.handle(TokensCame(1, [token(1)], served.now_s + 0.012), after_s=0.03)
    assert learned_s(served) < before_s


def test_only_the_second_token_teaches() -> None:
    served = held()
    served.decode(decode_pb2.Admitted(), token(1), after_s=0.01)
    before = served.fleet.decodes["d1"].second_token.at(0.0)
    served.decode(token(2), after_s=0.5)
    assert served.fleet.decodes["d1"].second_token.at(0.0) == before


def test_a_second_token_that_comes_first_teaches_that_there_is_no_delay() -> None:
    served = called()
    before_s = learned_s(served)
    served.decode(decode_pb2.Admitted(), token(1))
    served.prefill(first_token())
    assert learned_s(served) < before_s


def test_a_hand_over_that_was_tried_again_teaches_nothing() -> None:
    retried = called()
    retried.prefill_ended(GONE)
    retried.decode(reserved(lease=2))
    retried.prefill(SCHEDULED, first_token(), SENT, call=2)
    before = [node.second_token.at(0.0) for node in retried.fleet.decodes.values()]
    retried.decode(decode_pb2.Admitted(), token(1), after_s=0.04)
    assert [node.second_token.at(0.0) for node in retried.fleet.decodes.values()] == before
    served = held()
    served.session_lost()
    served.decode(accepted(), token(1), attempt=2, after_s=0.04)
    assert served.token_ids == [100, 101]
    assert [node.second_token.at(0.0) for node in served.fleet.decodes.values()] == before


def test_each_decode_node_has_its_own_delay_which_goes_with_it() -> None:
    served = called()
    before_s = served.fleet.decodes["d2"].second_token.at(0.0)
    served.prefill(first_token())
    served.decode(decode_pb2.Admitted(), token(1), after_s=0.05)
    assert served.fleet.decodes["d2"].second_token.at(0.0) == before_s
    assert served.fleet.decodes["d1"].second_token.at(0.0) > before_s
    served.fleet.remove(DECODE, "d1", 0.0)
    served.fleet.add(DECODE, "d1")
    assert served.fleet.decodes["d1"].second_token.at(0.0) == 0.0


# ---- what others count


def test_the_first_token_came_when_it_came_although_a_hand_over_goes_on_after_it() -> None:
    served = called()
    served.prefill_ended(GONE)
    served.decode(accepted(), token(0))
    came_at_s = served.now_s
    served.session_lost()
    served.decode(reserved(), attempt=2, after_s=0.5)
    served.prefill(SCHEDULED, first_token(1), call=2)
    assert served.token_ids == [100, 101]
    assert served.machine.first_token_came_at_s == came_at_s


def known_overheads() -> LearnedOverheads:
    """With them and a step of 5 ms, a first token is expected after it came and before it was passed on."""
    overheads = LearnedOverheads()
    for _ in range(400):
        overheads.add(remote=True, predicted_s=0.0, ttft_s=CAME_S - 0.001, now_s=0.0)
    return overheads


def finished(delay_s: float) -> Served:
    """A request whose first token was held, if the delay is long enough, and whose second one was also its last."""
    served = Served(prefills=1, decodes=1, start=False)
    for role, number in ((PREFILL, 11), (DECODE, 21)):
        reported = status(role, number, *([peer(21)] if role == PREFILL else []))
        reported.step_costs.points.add(tokens=64, seconds=STEP_S)
        served.fleet.status_received(role, "p1" if role == PREFILL else "d1", reported, 0.0)
    served.fleet.decodes["d1"].second_token = taught(delay_s)
    served.fleet.overheads = known_overheads()
    served.handle(Started())
    served.decode(reserved())
    served.prefill(SCHEDULED, first_token(), SENT, after_s=CAME_S)
    served.decode(decode_pb2.Admitted(), after_s=0.008)
    served.decode(token(1, LENGTH))
    return served


def test_routing_learns_when_the_first_token_came_and_the_receipt_says_when_the_client_got_it() -> None:
    plain, late = finished(0.0), finished(0.03)
    assert late.fleet.overheads.at(late.now_s) == plain.fleet.overheads.at(plain.now_s)
    assert plain.fleet.overheads.at(plain.now_s).remote_s < known_overheads().at(plain.now_s).remote_s
    assert late.machine.first_token_came_at_s == plain.machine.first_token_came_at_s == CAME_S
    assert (plain.receipt.ttft_s, late.receipt.ttft_s) == pytest.approx((CAME_S, CAME_S + 0.008))
    assert plain.receipt.why == "prompt prefilled on node-11"
    assert late.receipt.why == "prompt prefilled on node-11; the first token waited 8.0 ms for the second one"
    assert plain.token_ids == late.token_ids
