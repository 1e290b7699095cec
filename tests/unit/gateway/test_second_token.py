"""When the second token of a hand-over comes is learned from earlier ones, and says how long the first one waits."""

import random
from math import inf

import pytest

from baton.core.types import DEFAULT_OBJECTIVE, NO_SLO, Objective, Slo
from baton.gateway.fleet.second_token import SecondTokenDelay, hold_s, longest_gap_s


def learned(*delays_s: float, times: int = 200) -> SecondTokenDelay:
    delay = SecondTokenDelay()
    draw = random.Random(0)
    for _ in range(times):
        delay.add(draw.choice(delays_s), 0.0)
    return delay


def test_nothing_is_known_at_first() -> None:
    assert SecondTokenDelay().at(5.0) == 0.0


def test_the_delay_of_equal_hand_overs_is_found() -> None:
    assert learned(0.0175).at(0.0) == pytest.approx(0.0175, rel=0.1)


def test_few_hand_overs_are_enough_and_the_slow_ones_at_the_start_do_not_count() -> None:
    delay = SecondTokenDelay()
    delay.add(0.9, 0.0)
    assert delay.at(0.0) == pytest.approx(0.1)
    for delay_s in (0.03, 0.016, 0.018):
        delay.add(delay_s, 0.0)
    assert delay.at(0.0) == pytest.approx(0.016)
    for _ in range(30):
        delay.add(0.0175, 0.0)
    assert delay.at(0.0) == pytest.approx(0.0175, rel=0.1)


def test_three_quarters_come_earlier_and_rare_long_delays_hardly_count() -> None:
    delay_s = learned(0.012, 0.014, 0.016, 0.018, times=1000).at(0.0)
    assert 0.0145 < delay_s < 0.0185
    with_stalls_s = learned(*[0.012, 0.014, 0.016, 0.018] * 5, 2.0, times=1000).at(0.0)
    assert with_stalls_s < 1.25 * delay_s


def test_a_delay_that_has_gone_is_unlearned() -> None:
    delay = learned(0.05)
    for _ in range(200):
        delay.add(0.006, 1.0)
    assert delay.at(1.0) == pytest.approx(0.006, rel=0.1)
    for _ in range(200):
        delay.add(0.0, 2.0)
    assert delay.at(2.0) < 1e-3


def test_half_of_the_delay_is_forgotten_in_ten_minutes_without_hand_overs() -> None:
    delay = learned(0.0175)
    assert delay.at(600.0) == pytest.approx(delay.at(0.0) / 2)
    assert delay.at(36_000.0) < 1e-6


def test_a_hand_over_every_ten_seconds_is_enough_to_learn() -> None:
    delay = SecondTokenDelay()
    for number in range(100):
        delay.add(0.0175, 10.0 * number)
    assert delay.at(1000.0) == pytest.approx(0.0175, rel=0.12)


def test_no_delay_counts_as_more_than_a_tenth_of_a_second() -> None:
    assert learned(30.0, times=2000).at(0.0) == pytest.approx(0.1)


def test_a_gap_may_be_the_objectives_multiple_of_a_plain_step() -> None:
    assert longest_gap_s(0.005, NO_SLO, DEFAULT_OBJECTIVE) == pytest.approx(0.0075)
    assert longest_gap_s(0.005, Slo(ttft_s=0.2), Objective(gap_factor=3.0)) == pytest.approx(0.015)
    assert longest_gap_s(inf, NO_SLO, DEFAULT_OBJECTIVE) == inf


def test_a_gap_may_be_the_tpot_but_is_no_shorter_than_a_plain_step() -> None:
    assert longest_gap_s(0.005, Slo(tpot_s=0.01), DEFAULT_OBJECTIVE) == 0.01
    assert longest_gap_s(0.005, Slo(tpot_s=0.002), DEFAULT_OBJECTIVE) == 0.005
    assert longest_gap_s(inf, Slo(tpot_s=0.01), DEFAULT_OBJECTIVE) == 0.01


@pytest.mark.parametrize(
    ("delay_s", "gap_s", "slo", "waited_s", "expected_s"),
    [
        (0.0175, 0.0075, NO_SLO, 0.02, 0.01),
        (0.0175, 0.017, NO_SLO, 0.02, 0.0),  # less than 1 ms
        (0.006, 0.0075, NO_SLO, 0.02, 0.0),
        (0.0, 0.0075, NO_SLO, 0.02, 0.0),
        (0.0175, inf, NO_SLO, 0.02, 0.0),
        (0.1, 0.0075, NO_SLO, 0.02, 0.05),
        (0.0175, 0.0075, Slo(ttft_s=0.1), 0.02, 0.01),
        (0.0175, 0.0075, Slo(ttft_s=0.1), 0.085, 0.005),  # a tenth of the TTFT is left
        (0.0175, 0.0075, Slo(ttft_s=0.1), 0.0895, 0.0),
        (0.0175, 0.0075, Slo(ttft_s=0.1), 0.3, 0.0),  # late already
        (0.0175, 0.0075, Slo(tpot_s=0.0075), 9.0, 0.01),
    ],
)
def test_the_first_token_waits_for_what_a_gap_may_not_be(
    delay_s: float, gap_s: float, slo: Slo, waited_s: float, expected_s: float
) -> None:
    assert hold_s(delay_s, gap_s, slo, waited_s=waited_s) == pytest.approx(expected_s)


def test_a_process_that_does_not_know_of_a_restart_teaches_nothing() -> None:
    memory = memoryview(bytearray(4 * 8)).cast("d")
    late, aware = SecondTokenDelay(7, memory), SecondTokenDelay(8, memory)
    late.add(0.04, 1.0)
    assert aware.at(1.0) == 0.0
    aware.add(0.02, 1.0)
    assert aware.at(1.0) > 0.0
