"""When the next step is launched: as late as is safe, and at once while times are unknown or vary."""

import pytest

from baton.engine.launch_pace import LaunchPace

STEP_S = 0.010
LAUNCH_S = 0.001
MARGINS_S = 0.02 * STEP_S + 0.0005


class Clock:
    """Steps one after the other; each is launched when it is due, or at once."""

    def __init__(self) -> None:
        self.pace = LaunchPace()
        self.now = 0.0

    def step(self, *, launch_s: float = LAUNCH_S, step_s: float = STEP_S, predicted_s: float | None = STEP_S) -> None:
        self.pace.launched(self.now)
        self.pace.started(self.now, predicted_s, now=self.now)
        launched_s = self.now + launch_s
        self.now += step_s
        self.pace.ended(launched_s=launched_s, ended_s=self.now)

    def steps(self, count: int) -> "Clock":
        for _ in range(count):
            self.step()
        return self

    def wait_s(self) -> float | None:
        """How long the launch after a step that starts now waits."""
        self.pace.started(self.now, STEP_S, now=self.now)
        return None if self.pace.due_s is None else self.pace.due_s - self.now


def test_a_launch_waits_only_when_enough_steps_were_measured() -> None:
    clock = Clock().steps(7)
    assert clock.wait_s() is None
    assert clock.steps(1).wait_s() is not None


def test_a_launch_does_not_wait_without_a_prediction() -> None:
    clock = Clock().steps(20)
    clock.pace.started(clock.now, None, now=clock.now)
    assert clock.pace.due_s is None


def test_steady_steps_leave_the_time_of_a_launch_and_a_margin() -> None:
    assert Clock().steps(60).wait_s() == pytest.approx(STEP_S - LAUNCH_S - MARGINS_S, abs=1e-6)


def test_steps_that_end_before_their_prediction_are_expected_to() -> None:
    clock = Clock()
    for _ in range(60):
        clock.step(step_s=0.8 * STEP_S)
    assert clock.wait_s() == pytest.approx(0.8 * STEP_S - LAUNCH_S - MARGINS_S, abs=1e-6)


def test_launches_or_steps_whose_times_vary_leave_no_time_to_wait() -> None:
    launches, steps = Clock(), Clock()
    for index in range(40):
        launches.step(launch_s=LAUNCH_S * (1 + 8 * (index % 2)))
        steps.step(step_s=STEP_S * (0.5 + index % 2))
    for clock in (launches, steps):
        wait_s = clock.wait_s()
        assert wait_s is not None
        assert wait_s < 0


def test_one_slow_launch_is_soon_forgotten() -> None:
    clock = Clock().steps(20)
    clock.step(launch_s=1.0)
    wait_s = clock.wait_s()
    assert wait_s is not None
    assert wait_s < 0
    wait_s = clock.steps(60).wait_s()
    assert wait_s is not None
    assert wait_s > 0.7 * STEP_S


def test_a_launch_that_waits_for_the_one_before_it_needs_no_more_lead() -> None:
    """All are due at once, and the launching thread takes them in turn."""
    pace = LaunchPace()
    for number in range(60):
        pace.launched(0.0)
        pace.started(number * STEP_S, STEP_S, now=number * STEP_S)
        pace.ended(launched_s=(number + 1) * LAUNCH_S, ended_s=(number + 1) * STEP_S)
    pace.started(0.0, STEP_S, now=0.0)
    assert pace.due_s == pytest.approx(STEP_S - LAUNCH_S - MARGINS_S, abs=1e-5)


def test_the_lead_of_a_launch_counts_from_when_it_was_due_except_where_nothing_could_run_then() -> None:
    clock = Clock().steps(60)
    clock.pace.started(clock.now, STEP_S, now=clock.now)
    due_s = clock.pace.due_s
    assert due_s is not None
    assert clock.pace.begin(now=due_s + 0.002) == due_s
    assert clock.pace.begin(now=due_s + 0.004) == due_s + 0.004
