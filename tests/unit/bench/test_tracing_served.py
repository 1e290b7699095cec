"""What traces add to a request, from rounds that other work on the machine disturbs."""

import pytest

from bench.tracing_served import Measured, Middle, rows_of


def test_the_middle_ignores_an_outlier() -> None:
    assert Middle.of([1.0, 1.1, 0.9, 1.05, 0.95, 40.0]).median == pytest.approx(1.025)
    assert Middle.of([1.0, 1.1, 0.9, 1.05, 0.95, 40.0]).error < 0.1
    assert Middle.of([2.0] * 5) == Middle(2.0, 0.0)


def test_what_is_added_is_the_difference_of_each_pair_over_a_request_of_usual_length() -> None:
    slow = [1.0, 3.0, 2.0]  # what else ran in each round
    short = {
        "off": [1000.0 * factor for factor in slow],
        "10 % exported": [1000.0 * factor + 10 for factor in slow],
        "all exported": [1000.0 * factor + 100 for factor in slow],
    }
    rows = {(row.name, row.unit): row for row in rows_of(Measured(short, [4000.0, 5000.0, 20000.0]))}
    assert rows["added, 10 % exported", "us"].measured == pytest.approx(10.0)
    share = rows["added, 10 % exported: share", "%"]
    assert share.measured == pytest.approx(0.2)
    assert share.reached
    assert rows["added, all exported: share", "%"].measured == pytest.approx(2.0)
    assert rows["added, all exported: share", "%"].reached is None
    assert rows["added, all exported: standard error", "us"].measured == 0.0
