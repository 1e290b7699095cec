"""Which node owes the next answer in an attempt, and until when."""

import pytest

from baton.gateway.request.attempt import Attempt, PrefillCall
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet


def attempt(**facts: object) -> Attempt:
    """An attempt with a call to a node whose last message came at 5 s, on a decode node whose last one came at 3 s."""
    fleet = SmallFleet(1, 1)
    fleet.message_received(PREFILL, "p1", 5.0)
    fleet.message_received(DECODE, "d1", 3.0)
    call = PrefillCall(1, fleet.prefills["p1"], last_message_at_s=2.0, **facts)  # type: ignore[arg-type]
    return Attempt(1, fleet.decodes["d1"], num_given=0, waiting_since_s=1.0, answered=True, call=call)


def stalls_at_s(it: Attempt) -> float:
    return it.stalls_at_s(prefill_stall_s=10.0, decode_stall_s=30.0, max_queue_s=100.0)


def test_a_call_in_the_queue_counts_from_any_sign_of_life_of_its_node() -> None:
    assert stalls_at_s(attempt()) == 15.0


def test_a_scheduled_call_counts_from_its_own_last_event() -> None:
    assert stalls_at_s(attempt(scheduled=True)) == 12.0


@pytest.mark.parametrize("facts", [{"sent": True}, {"running": False}])
def test_a_call_that_is_done_leaves_the_next_answer_to_the_decode_node(facts: dict[str, object]) -> None:
    assert not attempt(**facts).prefill_node_owes
    assert stalls_at_s(attempt(**facts)) == 33.0


def test_an_unanswered_submission_may_wait_for_room_too() -> None:
    it = attempt()
    it.answered = False
    assert stalls_at_s(it) == 133.0


def test_the_first_token_is_owed_while_the_call_runs() -> None:
    it = attempt()
    assert it.first_token_owed
    it.first_token_passed = True
    assert not it.first_token_owed
    assert not it.first_token_lost


def test_the_first_token_is_lost_when_decode_was_admitted_and_the_call_is_over() -> None:
    it = attempt(running=False)
    assert not it.first_token_lost
    it.admitted = True
    assert it.first_token_lost
