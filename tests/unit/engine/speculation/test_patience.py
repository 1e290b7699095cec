"""How long requests wait for others' guesses: by what they may lose, and by what their own have saved."""

import pytest

from baton.engine.speculation.limits import FIRST_LEAD, MOST_LEAD, REGAINED_LEAD
from baton.engine.speculation.patience import Lead, Wait


def test_a_request_without_guesses_may_lose_its_first_lead_once() -> None:
    lead = Lead(10)
    assert lead.after(10, 0.01) == FIRST_LEAD
    lead.got(1, 11, FIRST_LEAD / 2 + 1, 0.01)
    assert lead.after(11, 0.01) == pytest.approx(FIRST_LEAD / 2)
    lead.got(1, 12, 99.0, 0.01)
    assert lead.after(12, 0.01) == 0.0


def test_plain_steps_give_a_little_back_up_to_the_first_lead() -> None:
    lead = Lead(0)
    lead.got(1, 1, 99.0, 0.01)
    assert lead.after(11, 0.01) == pytest.approx(10 * REGAINED_LEAD)
    assert lead.after(10**6, 0.01) == FIRST_LEAD
    lead.got(1, 12, 1.0, 0.01)
    assert lead.after(12, 0.01) == pytest.approx(10 * REGAINED_LEAD), "the step's own token gives nothing back"


def test_right_guesses_are_saved_up_to_the_most() -> None:
    lead = Lead(0)
    lead.got(9, 9, 3.0, 0.01)
    assert lead.after(9, 0.01) == lead.after(99, 0.01) == FIRST_LEAD + 6
    lead.got(90, 99, 3.0, 0.01)
    assert lead.after(99, 0.01) == MOST_LEAD
    lead.got(1, 100, 3.0, 0.01)
    assert lead.after(100, 0.01) == MOST_LEAD - 2


def test_what_a_request_without_guesses_loses_is_bounded_whatever_others_guess() -> None:
    """It waits each time for as long as it can."""
    lead, lost = Lead(0), 0.0
    for tokens in range(1, 401):
        waits = lead.after(tokens - 1, 0.01)
        lead.got(1, tokens, 1.0 + waits, 0.01)
        lost += waits
    assert lost <= FIRST_LEAD + 400 * REGAINED_LEAD


@pytest.mark.parametrize(
    ("tpot_s", "share", "wait"),
    [
        (None, 1.0, Wait(0.01, FIRST_LEAD * 0.01)),
        (None, 0.5, Wait(0.01, FIRST_LEAD * 0.005)),
        (0.02, 1.0, Wait(0.018, 0.0)),
        (0.02, 0.5, Wait(0.014, 0.0)),
        (0.0105, 1.0, Wait(0.01, 0.0)),  # a tenth of a TPOT is left for what predictions miss
        (0.004, 1.0, Wait(0.01, 0.0)),  # no step keeps it
    ],
)
def test_a_request_waits_as_long_as_its_tpot_allows_or_for_its_lead(
    tpot_s: float | None, share: float, wait: Wait
) -> None:
    assert Lead(5, tpot_s).wait(5, 0.01, share) == pytest.approx(wait)


def test_a_request_with_a_tpot_waits_for_what_plain_steps_leave_of_it_and_its_own_guesses_save() -> None:
    lead = Lead(0, 0.02)
    assert lead.after(1, 0.01) == pytest.approx(0.8)
    assert lead.after(100, 0.01) == FIRST_LEAD
    assert lead.after(100, 0.019) == lead.after(100, 0.05) == 0.0
    lead.got(6, 6, 2.0, 0.01)
    assert lead.after(6, 0.01) == 4.0
    lead.got(1, 7, 9.0, 0.01)
    assert lead.after(7, 0.01) == 0.0
