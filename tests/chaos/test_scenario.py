"""A seed draws a run: always the same one, and with all kinds of faults and requests."""

from collections.abc import Callable
from importlib import import_module

import pytest

from tests.chaos.faults import KINDS
from tests.chaos.history import Asked, DiedAt, End, Ended, Event, FaultBegan, Measured, Received, line_of
from tests.chaos.scenario import draw
from tests.chaos.soak import slope_of, slopes, soak_scenario
from tests.chaos.steps import DECODE_STEPS, PREFILL_STEPS, step_of
from tests.chaos.storm import Storm
from tests.chaos.summary import from_json, page, round_of, to_json


def test_a_seed_draws_the_same_run_again() -> None:
    assert draw(7, seconds=60) == draw(7, seconds=60)
    assert draw(7, seconds=60) != draw(8, seconds=60)


def test_every_kind_of_fault_is_drawn_and_hits_what_it_is_for() -> None:
    scenario = draw(1, seconds=600)
    assert {fault.kind for fault in scenario.faults} == KINDS.keys()
    roles = {
        **dict.fromkeys(scenario.prefills, "prefill"),
        **dict.fromkeys(scenario.decodes, "decode"),
        **dict.fromkeys(scenario.gateways, "gateway"),
        **dict.fromkeys(scenario.links, "link"),
    }
    for fault in scenario.faults:
        assert roles[fault.target] in KINDS[fault.kind].on
        assert fault.detail in KINDS[fault.kind].details
    assert any(one.at_s == other.at_s for one, other in zip(scenario.faults, scenario.faults[1:], strict=False))


def test_every_kind_of_fault_has_a_method() -> None:
    assert all(callable(getattr(Storm, kind)) for kind in KINDS)


@pytest.mark.parametrize(("role", "names"), [("prefill", PREFILL_STEPS), ("decode", DECODE_STEPS)])
def test_every_step_is_a_call_of_the_product(role: str, names: tuple[str, ...]) -> None:
    for name in names:
        step = step_of(role, name)
        method: Callable[..., object] = getattr(getattr(import_module(step.module), step.owner), step.method)
        assert callable(method)


def test_the_slope_of_a_line_is_found() -> None:
    assert slope_of([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope_of([0, 1, 2], [4, 4, 4]) == 0
    assert slope_of([1], [4]) == 0


def test_a_soak_judges_the_processes_that_live_through_it() -> None:
    scenario = soak_scenario(1, seconds=60, every_s=10)
    assert {fault.target for fault in scenario.faults} == {"p1", "d1", "g1"}
    events = [FaultBegan(10.0 * number, number, "kill", "p1") for number in range(6)]
    measured = [
        Measured(second, name, 1, 300 + growth * second, 50)
        for second in range(0, 60, 5)
        for name, growth in (("d2", 0.0), ("p2", 1.0))
    ]
    flat, growing = slopes([*events, *measured, Measured(30.0, "g2", 2, 9.0, 9)], seconds=60)
    assert (flat.process, growing.process) == ("d2", "p2")
    assert (flat.flat, growing.flat) == (True, False)
    assert (flat.mib_per_restart, growing.mib_per_restart) == pytest.approx((0, 10))


def test_the_page_has_the_counts_of_all_rounds_and_the_time_until_the_cluster_answered() -> None:
    events: list[Event] = [
        Asked(0.0, 0, "one"),
        FaultBegan(1.0, 0, "kill", "d1"),
        Ended(1.5, 0, End.FINISHED, attempts=2),  # asked before the fault
        DiedAt(1.8, "p1", "prefill: listens"),
        Asked(2.0, 1, "one"),
        Received(2.5, 1, 0, (0,), (4,)),
        Ended(3.0, 1, End.FINISHED, attempts=1),
        Ended(3.0, 2, End.FAILED, "NO_NODE"),
        Ended(3.0, 3, End.FAILED, "DEADLINE_EXCEEDED"),
    ]
    found = round_of(draw(1, seconds=60), events, [])
    assert found.answered_s == {"kill": [2.0]}
    assert found.ends == {"finished": 2, "NO_NODE": 1, "DEADLINE_EXCEEDED": 1}
    assert from_json(to_json([found])) == [found]
    text = page([found, found], [], machine="a machine")
    assert "| finished | 4 |" in text
    assert "| kill | 2 | 2.00 s | 2.00 s |" in text
    assert "step of the hand-over: 2 prefill: listens." in text
    assert "| refused with a typed error | 2 (2 NO_NODE) |" in text
    assert "| past the client's deadline | 2 |" in text


def test_events_are_lines() -> None:
    assert line_of(Ended(1.0, 0, End.FAILED, "NO_NODE", "two\nlines")).count("\n") == 0
