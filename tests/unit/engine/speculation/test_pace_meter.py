"""What a node reports of its decode steps with guesses."""

import pytest

from baton.core.decode_pace import PLAIN_PACE, DecodePace
from baton.engine.speculation.pace_meter import PaceMeter


def test_the_pace_is_the_mean_of_the_latest_steps() -> None:
    meter = PaceMeter()
    assert meter.pace == PLAIN_PACE
    for ratio, tokens, guesses in ((1.5, 3.0, True), (1.1, 1.0, False)) * 2000:
        meter.add(ratio, tokens, guesses=guesses)
    assert meter.pace == pytest.approx((1.3, 2.0), rel=0.01)
    assert meter.pace.token_ratio == pytest.approx(0.65, rel=0.01)
    for _ in range(300):
        meter.add(2.0, 2.5, guesses=True)
    assert meter.pace == pytest.approx((2.0, 2.5), rel=0.1)


def test_the_first_steps_count_at_once() -> None:
    meter = PaceMeter()
    meter.add(1.2, 2.0, guesses=True)
    assert meter.pace == DecodePace(1.2, 2.0)


def test_without_guesses_steps_are_plain_again_whatever_waits_cost() -> None:
    meter = PaceMeter()
    for guesses in (*[True] * 1000, *[False] * 1000):
        meter.add(1.1, 1.0 + guesses, guesses=guesses)
    assert meter.pace == PLAIN_PACE
