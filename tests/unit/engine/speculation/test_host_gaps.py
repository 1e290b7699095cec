"""What the engine learns about waits for the host."""

import pytest

from baton.engine.speculation.host_gaps import HostGaps


def test_more_rows_are_expected_to_take_longer_before_anything_is_measured() -> None:
    gaps = HostGaps()
    assert gaps.seconds(14) == pytest.approx(0.0027, rel=0.1)
    assert gaps.seconds(75) == pytest.approx(0.0039, rel=0.1)
    assert gaps.seconds(227) == pytest.approx(0.007, rel=0.1)


@pytest.mark.parametrize(("step_s", "row_s"), [(0.001, 1e-5), (0.004, 5e-5), (0.0, 2e-5), (0.003, 0.0)])
def test_measured_waits_replace_what_was_assumed(step_s: float, row_s: float) -> None:
    gaps = HostGaps()
    for step in range(2000):
        rows = 1 + 37 * step % 400
        gaps.late(rows, step_s + row_s * rows, guesses=True)
    for rows in (8, 100, 400):
        assert gaps.seconds(rows) == pytest.approx(step_s + row_s * rows, rel=0.08, abs=2e-4)


def test_steps_of_one_size_say_little_about_others() -> None:
    gaps = HostGaps()
    for _ in range(2000):
        gaps.late(32, 0.005, guesses=True)
    assert gaps.seconds(32) == pytest.approx(0.005, rel=0.05)
    assert 0.005 <= gaps.seconds(256) < 0.04


def test_the_step_after_single_guesses_counts_against_them() -> None:
    gaps = HostGaps()
    for _ in range(500):
        gaps.late(8, 0.001, guesses=True)
        gaps.late(8, 0.001, guesses=False)
    assert gaps.seconds(8) == pytest.approx(0.002, rel=0.1)


def test_waits_that_end_without_guesses_make_guesses_dearer() -> None:
    gaps = HostGaps()
    for _ in range(100):
        gaps.late(8, 0.001, guesses=False)
    assert gaps.seconds(8) > 5 * HostGaps().seconds(8)


def test_a_dear_past_is_forgotten_over_steps_without_guesses() -> None:
    gaps = HostGaps()
    for _ in range(500):
        gaps.late(8, 0.05, guesses=True)
    for _ in range(150_000):
        gaps.on_time()
    assert gaps.seconds(8) == pytest.approx(HostGaps().seconds(8), rel=0.05)


@pytest.mark.parametrize("seconds", [-0.001, 0.1, 7.0, float("nan"), float("inf")])
def test_times_that_guesses_cannot_have_taken_are_ignored(seconds: float) -> None:
    gaps = HostGaps()
    gaps.late(8, seconds, guesses=True)
    assert gaps.seconds(8) == HostGaps().seconds(8)
