"""What the engine learns about waits for the host."""

import pytest

from baton.engine.speculation.host_gaps import HostGaps


def test_more_rows_are_expected_to_take_longer_before_anything_is_measured() -> None:
    gaps = HostGaps()
    assert gaps.seconds(1) < gaps.seconds(8) < gaps.seconds(128)


def test_measured_waits_replace_what_was_assumed() -> None:
    gaps = HostGaps()
    for _ in range(500):
        gaps.late(32, 0.003, guesses=True)
    assert gaps.seconds(32) == pytest.approx(0.003, rel=0.05)
    assert gaps.seconds(40) == pytest.approx(0.003, rel=0.05)  # a similar number
    assert gaps.seconds(1) == HostGaps().seconds(1)


def test_the_step_after_single_guesses_counts_against_them() -> None:
    gaps = HostGaps()
    for _ in range(500):
        gaps.late(8, 0.001, guesses=True)
        gaps.late(8, 0.001, guesses=False)
    assert gaps.seconds(8) == pytest.approx(0.002, rel=0.05)


def test_waits_that_end_without_guesses_make_guesses_dearer() -> None:
    gaps = HostGaps()
    for _ in range(100):
        gaps.late(8, 0.001, guesses=False)
    assert gaps.seconds(8) > 10 * HostGaps().seconds(8)


def test_a_dear_past_is_forgotten_over_steps_without_guesses() -> None:
    gaps = HostGaps()
    for _ in range(500):
        gaps.late(8, 0.05, guesses=True)
    for _ in range(200_000):
        gaps.on_time(8)
    assert gaps.seconds(8) == pytest.approx(HostGaps().seconds(8), rel=0.05)


@pytest.mark.parametrize("seconds", [-0.001, 0.1, 7.0, float("nan"), float("inf")])
def test_times_that_guesses_cannot_have_taken_are_ignored(seconds: float) -> None:
    gaps = HostGaps()
    gaps.late(8, seconds, guesses=True)
    assert gaps.seconds(8) == HostGaps().seconds(8)
