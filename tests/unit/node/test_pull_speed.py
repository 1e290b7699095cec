"""Whether a pull is worth it: by measurement, and before there is one, by a number of tokens."""

import pytest

from baton.core.pull_costs import (
    ASSUMED_PULL,
    UNMEASURED_TOKENS,
    PullCosts,
    is_worth_pulling,
    predicted_pull_s,
)
from baton.node.pull_speed import PullSample, PullSpeed

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


def test_the_mean_of_all_pulls_has_a_fixed_part_that_leaves_time_for_the_bytes() -> None:
    assert measured().mean_costs(0.0) is None
    assert measured((MIB, 0.1)).mean_costs(200.0) is None
    mean = measured((10 * MIB, 0.015), (90 * MIB, 0.095)).mean_costs(1.0)
    assert mean is not None
    assert mean.fixed_s == ASSUMED_PULL.fixed_s
    assert mean.byte_s == pytest.approx(0.1 / (100 * MIB))
    fast = measured((MIB, 0.001), (MIB, 0.001)).mean_costs(1.0)
    assert fast == PullCosts(0.0005, 0.0005 / MIB), "gateways take a pull whose bytes cost nothing for one not measured"


@pytest.mark.parametrize(
    ("costs", "tokens", "compute_s", "predicted_s"),
    [
        (PullCosts(0.01, 1e-9), 64, 1.0, 0.011),
        (PullCosts(0.01, 1e-9), 64, 0.012, None),
        (None, UNMEASURED_TOKENS, 1.0, ASSUMED_PULL.seconds(1_000_000)),
        (None, UNMEASURED_TOKENS - 1, 1.0, None),
        (None, UNMEASURED_TOKENS, 0.005, None),
        (PullCosts(6.0, 1e-9), 64, 100.0, None),
    ],
)
def test_a_pull_is_predicted_where_the_node_would_begin_it_and_end_it_in_time(
    costs: PullCosts | None, tokens: int, compute_s: float, predicted_s: float | None
) -> None:
    assert predicted_pull_s(costs, tokens, 1_000_000, compute_s) == pytest.approx(predicted_s)
