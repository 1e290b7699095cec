"""How long requests wait for others' guesses: by what they may lose, and by what their own have saved."""

import pytest

from baton.engine.scheduling.slices import StreamBound
from baton.engine.speculation.limits import FIRST_LEAD, MOST_LEAD, REGAINED_LEAD
from baton.engine.speculation.patience import NO_BOUND, Lead, Patience, patience_of


def test_a_request_without_guesses_may_lose_its_first_lead_once() -> None:
    lead = Lead(10)
    assert lead.after(10) == FIRST_LEAD
    lead.got(1, 11, FIRST_LEAD / 2 + 1)
    assert lead.after(11) == pytest.approx(FIRST_LEAD / 2)
    lead.got(1, 12, 99.0)
    assert lead.after(12) == 0.0


def test_plain_steps_give_a_little_back_up_to_the_first_lead() -> None:
    lead = Lead(0)
    lead.got(1, 1, 99.0)
    assert lead.after(11) == pytest.approx(10 * REGAINED_LEAD)
    assert lead.after(10**6) == FIRST_LEAD
    lead.got(1, 12, 1.0)
    assert lead.after(12) == pytest.approx(10 * REGAINED_LEAD), "the step's own token gives nothing back"


def test_right_guesses_are_saved_up_to_the_most() -> None:
    lead = Lead(0)
    lead.got(9, 9, 3.0)
    assert lead.after(9) == lead.after(99) == FIRST_LEAD + 6
    lead.got(90, 99, 3.0)
    assert lead.after(99) == MOST_LEAD
    lead.got(1, 100, 3.0)
    assert lead.after(100) == MOST_LEAD - 2


def test_what_a_request_without_guesses_loses_is_bounded_whatever_others_guess() -> None:
    """It waits each time for as long as it can."""
    lead, lost = Lead(0), 0.0
    for tokens in range(1, 401):
        waits = lead.after(tokens - 1)
        lead.got(1, tokens, 1.0 + waits)
        lost += waits
    assert lost <= FIRST_LEAD + 400 * REGAINED_LEAD


def test_a_tpot_is_time_to_spare_only_if_every_stream_has_one() -> None:
    slow, tight, none = StreamBound(0.03, 1.5), StreamBound(0.02, 1.5), StreamBound(None, 1.5)
    assert patience_of([0.0], [], 0.01, [slow, tight]).token_s == pytest.approx(0.9 * 0.02)
    assert patience_of([0.0], [], 0.01, [slow, none]).token_s == 0.01
    assert patience_of([0.0], [], 0.01, [StreamBound(0.004, 1.5)]).token_s == 0.01, "no step keeps it"
    assert patience_of([], [], 0.01, []) == NO_BOUND


def test_the_least_patient_request_without_a_proposal_counts_and_prompts_take_their_share() -> None:
    streams = [StreamBound(None, 1.5)]
    assert patience_of([1.0, 2.0], [3.0, 0.5], 0.01, streams) == Patience(0.01, [0.01, 0.02], 0.005, True)
    half = patience_of([1.0], [2.0], 0.01, streams, share=0.5, all_bear=False)
    assert half == Patience(0.01, [0.005], 0.01, False)
