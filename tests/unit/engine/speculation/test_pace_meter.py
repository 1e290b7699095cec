"""What a node reports of its decode steps with drafts."""

import pytest

from baton.core.decode_pace import PLAIN_PACE, DecodePace
from baton.engine.speculation.pace_meter import PaceMeter


def test_the_pace_is_the_mean_of_the_latest_steps() -> None:
    meter = PaceMeter()
    assert meter.pace == PLAIN_PACE
    for ratio, tokens, drafts in ((1.5, 3.0, True), (1.1, 1.0, False)) * 2000:
        meter.add(ratio, tokens, drafts=drafts)
    assert meter.pace == pytest.approx((1.3, 2.0, 1.0), rel=0.01)
    assert meter.pace.token_ratio == pytest.approx(0.65, rel=0.01)
    for _ in range(300):
        meter.add(2.0, 2.5, drafts=True)
    assert meter.pace == pytest.approx((2.0, 2.5, 1.0), rel=0.1)


def test_steps_with_prompts_have_a_ratio_of_their_own() -> None:
    """Drafts leave prompts half of the time that there is, so fewer are taken in their steps."""
    meter = PaceMeter()
    for prompts in [False] * 9 + [True]:
        meter.add(1.2 if prompts else 1.5, 2.0, drafts=True, prompts=prompts)
    assert meter.pace == pytest.approx((1.47, 2.0, 1.2), rel=0.01)


def test_the_first_steps_count_at_once() -> None:
    meter = PaceMeter()
    meter.add(1.2, 2.0, drafts=True)
    assert meter.pace == pytest.approx(DecodePace(1.2, 2.0))


def test_without_drafts_steps_are_plain_again_whatever_waits_cost() -> None:
    meter = PaceMeter()
    for drafts in (*[True] * 1000, *[False] * 1000):
        meter.add(1.1, 1.0 + drafts, drafts=drafts)
    assert meter.pace == PLAIN_PACE
