"""How long requests wait for others' drafts: by what they may lose, and by what their own have saved."""

import pytest

from baton.engine.speculation.limits import CREDIT_OF_STEP, FIRST_CREDIT, MOST_CREDIT, REGAINED_CREDIT
from baton.engine.speculation.wait_bounds import WaitBound, WaitCredit


def test_a_request_without_drafts_loses_its_first_credit_once() -> None:
    credit = WaitCredit(10)
    assert credit.after(10) == FIRST_CREDIT
    credit.charge(1, 11, FIRST_CREDIT / 2 + 1)
    assert credit.after(11) == pytest.approx(FIRST_CREDIT / 2)


def test_steps_that_take_longer_than_predicted_leave_a_debt_that_is_bounded() -> None:
    credit = WaitCredit(0)
    credit.charge(1, 1, FIRST_CREDIT + 2)
    assert credit.after(1) == pytest.approx(-1)
    credit.charge(1, 2, 99.0)
    assert credit.after(2) == -FIRST_CREDIT
    assert credit.bound(2, 0.01, 1.0) == WaitBound(0.01, 0.0)


def test_plain_steps_give_a_little_back_up_to_the_first_credit() -> None:
    credit = WaitCredit(0)
    credit.charge(1, 1, FIRST_CREDIT + 1)
    assert credit.after(11) == pytest.approx(10 * REGAINED_CREDIT)
    assert credit.after(10**6) == FIRST_CREDIT
    credit.charge(1, 12, 1.0)
    assert credit.after(12) == pytest.approx(10 * REGAINED_CREDIT), "the step's own token gives nothing back"


def test_accepted_drafts_are_saved_up_to_the_most_and_spent_over_several_steps() -> None:
    credit = WaitCredit(0)
    credit.charge(9, 9, 3.0)
    assert credit.after(9) == credit.after(99) == FIRST_CREDIT + 6
    credit.charge(90, 99, 3.0)
    assert credit.after(99) == MOST_CREDIT
    assert credit.bound(99, 0.01, 1.0) == WaitBound(0.01, CREDIT_OF_STEP * 0.01)
    credit.charge(1, 100, 3.0)
    assert credit.after(100) == MOST_CREDIT - 2


def test_what_a_request_without_drafts_loses_is_bounded_whatever_others_draft() -> None:
    """It waits each time for as long as it can."""
    credit, lost = WaitCredit(0), 0.0
    for tokens in range(1, 401):
        waits = credit.bound(tokens - 1, 1.0, 1.0).credit_s
        if waits:
            credit.charge(1, tokens, 1.0 + waits)
        lost += waits
    assert FIRST_CREDIT < lost <= FIRST_CREDIT + 400 * REGAINED_CREDIT


@pytest.mark.parametrize(
    ("tpot_s", "share", "bound"),
    [
        (None, 1.0, WaitBound(0.01, FIRST_CREDIT * 0.01)),
        (None, 0.5, WaitBound(0.01, FIRST_CREDIT * 0.005)),
        (0.02, 1.0, WaitBound(0.018, 0.0)),
        (0.02, 0.5, WaitBound(0.014, 0.0)),
        (0.0105, 1.0, WaitBound(0.01, 0.0)),  # a tenth of a TPOT is left for what predictions miss
        (0.004, 1.0, WaitBound(0.01, FIRST_CREDIT * 0.01)),  # no step keeps it, so it does not count
    ],
)
def test_a_request_waits_as_long_as_its_tpot_allows_or_for_its_credit(
    tpot_s: float | None, share: float, bound: WaitBound
) -> None:
    assert WaitCredit(5, tpot_s).bound(5, 0.01, share) == pytest.approx(bound)


def test_a_request_with_a_tpot_waits_beyond_it_only_for_what_its_own_drafts_have_saved() -> None:
    credit = WaitCredit(0, 0.02)
    assert credit.bound(1000, 0.01, 1.0).credit_s == 0.0
    credit.charge(5, 5, 2.0)
    assert credit.bound(5, 0.01, 1.0) == pytest.approx(WaitBound(0.018, 0.03))
    credit.charge(1, 6, 4.0)
    assert credit.bound(300, 0.01, 1.0).credit_s == 0.0
