"""What the run loop makes of a step's times."""

import pytest

from baton.engine.batch import Guessed
from baton.engine.device.device_thread import StepComputed
from baton.engine.step_loop import device_wait_s


def computed(guessed: Guessed | None) -> StepComputed:
    return StepComputed([], 0.010, {}, {}, launched_s=5.001, ended_s=5.020, guessed=guessed)


def test_a_device_that_guesses_does_not_wait() -> None:
    assert device_wait_s(computed(None), since_s=5.004) == pytest.approx(0.006)
    assert device_wait_s(computed(Guessed({0: (1,)}, 1, 0.004)), since_s=5.004) == pytest.approx(0.002)
