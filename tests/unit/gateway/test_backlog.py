"""Predicted work of a node between two reports."""

import pytest

from baton.gateway.fleet.backlog import Backlog


def test_what_was_sent_adds_up_and_passes_with_time() -> None:
    backlog = Backlog()
    backlog.reported(1.0, 10.0)
    backlog.add(0.5, 10.1)
    assert backlog.at(10.1) == pytest.approx(1.4)
    assert backlog.at(10.2) == pytest.approx(1.3)


def test_a_node_that_is_stuck_keeps_its_backlog() -> None:
    backlog = Backlog()
    backlog.reported(1.0, 10.0)
    assert backlog.at(1000.0) == pytest.approx(0.75)
    backlog.add(1.0, 1000.0)
    assert backlog.at(2000.0) == pytest.approx(1.75)


def test_a_report_takes_the_place_of_what_was_known() -> None:
    backlog = Backlog()
    backlog.add(5.0, 1.0)
    backlog.reported(0.5, 2.0)
    assert backlog.at(2.0) == 0.5
