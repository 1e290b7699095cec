"""Rows and plots of goodput, from answers of searches that are written down here."""

from pathlib import Path

import pytest

from baton.load.goals import Goal
from baton.load.results import Found
from bench.exposed import on_cpu
from bench.goodput.burst import _Seen
from bench.goodput.deployments import COLOCATED, ELASTIC, STATIC, Machine
from bench.goodput.plot import draw
from bench.goodput.search import GAP, MEAN, Plan, _rows

PLAN = Plan("chat", 0.4, (0.01, 0.02), start=1.0, wanted={0.01: 2.6}, duration_s=1.0)
MACHINE = Machine("the model", on_cpu(), [("--device", "cpu")] * 4)


def answer(name: str, rate: float, *, complete: bool = True) -> Found:
    return Found(name, Goal(tpot_s=0.01), rate, 0.95, 100, complete, at_most=True)


def rates(*, static_complete: bool = True) -> dict[tuple[str, float, str], Found]:
    found = {}
    for tpot_s in PLAN.tpots_s:
        for bound in (MEAN, GAP):
            found[COLOCATED, tpot_s, bound] = answer(COLOCATED, 1000 * tpot_s)
            found[STATIC, tpot_s, bound] = answer(STATIC, 20.0, complete=static_complete)
            found[ELASTIC, tpot_s, bound] = answer(ELASTIC, 30.0)
    return found


def test_each_slo_has_a_row_for_each_rival_with_its_goal() -> None:
    rows = list(_rows(PLAN, MACHINE, rates()))
    assert [(row.name.split(", ")[-1], row.rival, row.share, row.goal) for row in rows[:4]] == [
        ("mean 10 ms", COLOCATED, 3.0, 2.6),
        ("mean 10 ms", STATIC, 1.5, 1.0),
        ("p99 gap 10 ms", COLOCATED, 3.0, 1.0),
        ("p99 gap 10 ms", STATIC, 1.5, 1.0),
    ]
    assert [row.goal for row in rows[4:]] == [1.0] * 4
    assert rows[0].work == "chat, the model, 2P2D"


def test_a_rate_that_was_not_confirmed_says_so() -> None:
    rows = list(_rows(PLAN, MACHINE, rates(static_complete=False)))
    assert [("not confirmed" in row.work) for row in rows[:2]] == [False, True]


def test_the_plot_names_every_deployment_and_rate(tmp_path: Path) -> None:
    draw(list(_rows(PLAN, MACHINE, rates())), tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(f">{name}</text>" in text for name in (COLOCATED, STATIC, ELASTIC, "10 ms", "30"))


def test_gaps_count_where_they_end() -> None:
    seen = _Seen([[0.0, 0.5, 1.5], [1.0, 3.0]])
    assert seen.gaps_ms(0.0, 1.0) == [pytest.approx(500.0)]
    assert seen.gaps_ms(1.0, 2.0) == [pytest.approx(1000.0)]
