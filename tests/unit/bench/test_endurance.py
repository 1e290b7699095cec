"""Which readings count as growth."""

import pytest

from bench.endurance import Growth, Reading, growth_of

MIB = 1 << 20


def readings(*rss_mib: float, files: int = 20) -> list[Reading]:
    return [Reading(int(mib * MIB), files) for mib in rss_mib]


def test_the_second_quarter_is_compared_with_the_last() -> None:
    growth = growth_of("decode_node", readings(100, 150, 200, 202, 300, 300, 204, 206))
    assert growth == Growth("decode_node", Reading(201 * MIB, 20), Reading(205 * MIB, 20))


@pytest.mark.parametrize(("before", "after", "flat"), [(50, 51.9, True), (50, 52.1, False), (400, 403.9, True)])
def test_two_mebibytes_or_one_percent_are_no_growth(before: float, after: float, *, flat: bool) -> None:
    assert growth_of("x", readings(before, before, before, after)).flat == flat


def test_one_more_open_file_is_growth() -> None:
    assert not growth_of("x", [*readings(9, 9, 9), *readings(9, files=21)]).flat
