"""Whether a pull is worth it: by measurement, and before there is one, by a number of tokens."""

import pytest

from baton.node.pull_costs import UNMEASURED_TOKENS, PullSample, PullSpeed, is_worth_pulling

MIB = 1 << 20


def measured(*pulls: tuple[int, float], at_s: float = 0.0) -> PullSpeed:
    speed = PullSpeed()
    for num_bytes, seconds in pulls:
        speed.add(PullSample(at_s, num_bytes, seconds))
    return speed


def test_pulls_of_two_sizes_give_a_fixed_cost_and_a_rate() -> None:
    speed = measured((10 * MIB, 0.015), (100 * MIB, 0.105))
    assert speed.seconds(200 * MIB, 1.0) == pytest.approx(0.205)
    assert speed.seconds(0, 1.0) == pytest.approx(0.005)


def test_pulls_of_one_size_give_a_rate_and_never_less_than_the_shortest() -> None:
    speed = measured((10 * MIB, 0.010), (11 * MIB, 0.011))
    assert speed.seconds(100 * MIB, 1.0) == pytest.approx(0.100)
    assert speed.seconds(MIB, 1.0) == pytest.approx(0.010)


def test_a_larger_pull_that_was_faster_is_no_negative_rate() -> None:
    speed = measured((10 * MIB, 0.5), (100 * MIB, 0.1))
    predicted = speed.seconds(200 * MIB, 1.0)
    assert predicted is not None
    assert predicted > 0.1


def test_old_measurements_are_forgotten() -> None:
    speed = measured((10 * MIB, 9.0), at_s=0.0)
    assert speed.seconds(MIB, 60.0) is not None
    assert speed.seconds(MIB, 600.0) is None


@pytest.mark.parametrize("known", [(None, None), (0.001, None), (None, 0.001)])
def test_while_a_time_is_unknown_the_number_of_tokens_decides(known: tuple[float | None, float | None]) -> None:
    assert is_worth_pulling(UNMEASURED_TOKENS, *known)
    assert not is_worth_pulling(UNMEASURED_TOKENS - 1, *known)


def test_a_pull_must_be_clearly_faster_than_computing() -> None:
    assert is_worth_pulling(64, 0.01, 0.02)
    assert not is_worth_pulling(1 << 20, 0.019, 0.02)
