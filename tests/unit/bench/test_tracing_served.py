"""What traces add to a request, from rounds that other work on the machine disturbs."""

import pytest

from bench.tracing_served import Middle, rows_of


def test_the_middle_ignores_an_outlier() -> None:
    assert Middle.of([1.0, 1.1, 0.9, 1.05, 0.95, 40.0]).median == pytest.approx(1.025)
    assert Middle.of([1.0, 1.1, 0.9, 1.05, 0.95, 40.0]).error < 0.1
    assert Middle.of([2.0] * 5) == Middle(2.0, 0.0)


def test_what_is_added_is_the_difference_of_each_pair() -> None:
    slow = [1.0, 3.0, 2.0]  # what else ran in each round
    rows = rows_of(
        {
            "off": [1000.0 * factor for factor in slow],
            "10 % exported": [1000.0 * factor + 10 for factor in slow],
            "all exported": [1000.0 * factor + 100 for factor in slow],
        }
    )
    added = {row.name: row for row in rows if row.unit == "%"}
    assert added["added, 10 % exported"].measured == pytest.approx(0.5)
    assert added["added, 10 % exported"].reached
    assert added["added, all exported"].measured == pytest.approx(5.0)
    assert added["added, all exported"].reached is None
    assert added["added, all exported: standard error"].measured == 0.0
