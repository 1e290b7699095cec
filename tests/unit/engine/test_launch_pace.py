"""When the next step is launched: as late as is mostly in time, and at once while times are unknown."""

import pytest

from baton.engine.launch_pace import LaunchPace

STEP_S = 0.010
LAUNCH_S = 0.001
MARGIN_S = 0.0002


class Clock:
    """Steps one after the other; each is launched when it is due, or at once."""

    def __init__(self) -> None:
        self.pace = LaunchPace()
        self.now = 0.0

    def step(
        self,
        *,
        launch_s: float = LAUNCH_S,
        step_s: float = STEP_S,
        predicted_s: float | None = STEP_S,
        has_prompts: bool = False,
    ) -> None:
        self.pace.launched(self.now)
        self.pace.started(self.now, predicted_s, has_prompts=has_prompts, now=self.now)
        launched_s = self.now + launch_s
        self.now += step_s
        self.pace.ended(launched_s=launched_s, ended_s=self.now)

    def steps(self, count: int, **options: float) -> "Clock":
        for _ in range(count):
            self.step(**options)  # type: ignore[arg-type]
        return self

    def wait_s(self, *, has_prompts: bool = False) -> float | None:
        """How long the launch after a step that starts now waits."""
        self.pace.started(self.now, STEP_S, has_prompts=has_prompts, now=self.now)
        return None if self.pace.due_s is None else self.pace.due_s - self.now


def test_a_launch_waits_only_when_enough_were_measured() -> None:
    clock = Clock().steps(8)  # the first launch was next to no step
    assert clock.wait_s() is None
    assert clock.steps(1).wait_s() is not None


def test_a_launch_does_not_wait_without_a_prediction() -> None:
    clock = Clock().steps(20)
    clock.pace.started(clock.now, None, has_prompts=False, now=clock.now)
    assert clock.pace.due_s is None


def test_steady_steps_leave_the_time_of_a_launch_and_a_margin() -> None:
    assert Clock().steps(60).wait_s() == pytest.approx(STEP_S - LAUNCH_S - MARGIN_S)


@pytest.mark.parametrize("part", [0.8, 1.25])
def test_steps_are_expected_to_end_as_early_or_late_as_before(part: float) -> None:
    clock = Clock().steps(60, step_s=part * STEP_S)
    assert clock.wait_s() == pytest.approx(part * STEP_S - LAUNCH_S - MARGIN_S)


def test_of_launches_that_vary_one_in_fifty_is_late() -> None:
    """They take 0 to 4.975 ms, each of 200 times once."""
    clock = Clock()
    for number in range(1000):
        clock.step(launch_s=0.000025 * (number * 37 % 200))
    assert clock.wait_s() == pytest.approx(STEP_S - 0.98 * 0.005 - MARGIN_S)


def test_rare_slow_launches_change_nothing() -> None:
    clock = Clock().steps(200)
    for _ in range(3):
        clock.step(launch_s=0.9 * STEP_S)
        clock.steps(40)
    assert clock.wait_s() == pytest.approx(STEP_S - LAUNCH_S - MARGIN_S)


def test_launches_that_take_longer_from_now_on_are_soon_in_time() -> None:
    clock = Clock().steps(200).steps(12, launch_s=4 * LAUNCH_S)
    assert clock.wait_s() == pytest.approx(STEP_S - 4 * LAUNCH_S - MARGIN_S)


def test_launches_next_to_prompts_are_apart() -> None:
    """Their steps are predicted less well."""
    clock = Clock().steps(20)
    assert clock.wait_s(has_prompts=True) is None
    for _ in range(20):
        clock.step(has_prompts=True, step_s=0.5 * STEP_S)
        clock.step()
    assert clock.wait_s(has_prompts=True) == pytest.approx(0.5 * STEP_S - LAUNCH_S - MARGIN_S)
    assert clock.wait_s() == pytest.approx(STEP_S - LAUNCH_S - MARGIN_S)


def test_a_launch_that_waits_for_the_one_before_it_needs_no_more_lead() -> None:
    """All are due at once, and the launching thread takes them in turn."""
    pace = LaunchPace()
    for number in range(60):
        pace.launched(0.0)
        pace.started(number * STEP_S, STEP_S, has_prompts=False, now=number * STEP_S)
        pace.ended(launched_s=(number + 1) * LAUNCH_S, ended_s=(number + 1) * STEP_S)
    pace.started(0.0, STEP_S, has_prompts=False, now=0.0)
    assert pace.due_s == pytest.approx(STEP_S - LAUNCH_S - MARGIN_S)


def test_the_lead_of_a_launch_counts_from_when_it_was_due_except_where_nothing_could_run_then() -> None:
    clock = Clock().steps(60)
    clock.pace.started(clock.now, STEP_S, has_prompts=False, now=clock.now)
    due_s = clock.pace.due_s
    assert due_s is not None
    assert clock.pace.begin(now=due_s + 0.002) == due_s
    assert clock.pace.begin(now=due_s + 0.004) == due_s + 0.004
