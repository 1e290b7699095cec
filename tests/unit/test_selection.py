"""`make test-quick` takes cheap files first, within its bound of CPU time."""

from tests.selection import cheapest


def test_the_cheapest_files_are_chosen_up_to_the_bound() -> None:
    measured = {"dear": 50.0, "cheap": 1.0, "middling": 8.0}
    assert cheapest(set(measured), measured, 10.0) == {"cheap", "middling"}


def test_a_file_that_nobody_measured_is_chosen() -> None:
    assert cheapest({"new", "dear"}, {"dear": 50.0}, 10.0) == {"new"}
