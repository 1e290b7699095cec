"""The budget of bytes over time, with a clock that the tests set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.pacing import RateLimit

RATE = 1e6


def taken_s(limit: RateLimit, sizes: list[int], *, late_s: float) -> float:
    """Time at which a caller that is always late by that much takes the last of these messages."""
    now_s = 0.0
    for size in sizes:
        wait_s = limit.wait_s(now_s)
        now_s += wait_s + (late_s if wait_s else 0.0)
        assert limit.wait_s(now_s) == 0
        limit.take(size, now_s)
    return now_s + limit.wait_s(now_s)


def test_the_first_message_is_taken_at_once_however_large() -> None:
    limit = RateLimit(RATE)
    assert limit.wait_s(5.0) == 0
    limit.take(10 * int(RATE), 5.0)
    assert limit.wait_s(5.0) == pytest.approx(10, rel=0.01)
    assert limit.wait_s(14.0) == pytest.approx(1, rel=0.02)
    assert limit.wait_s(15.0) == 0


@given(st.lists(st.integers(1_000, 200_000), min_size=20, max_size=60), st.floats(0, 0.005))
def test_the_rate_holds_for_any_sizes_and_small_delays(sizes: list[int], late_s: float) -> None:
    wanted_s = sum(sizes) / RATE
    assert taken_s(RateLimit(RATE), sizes, late_s=late_s) == pytest.approx(wanted_s, abs=0.03)


def test_an_unused_budget_does_not_grow_into_a_burst() -> None:
    limit = RateLimit(RATE)
    limit.take(1000, 0.0)
    later_s = 100.0
    taken = 0
    while limit.wait_s(later_s) == 0:
        limit.take(1000, later_s)
        taken += 1000
    assert taken <= 0.03 * RATE
