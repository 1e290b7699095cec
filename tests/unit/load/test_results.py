"""Results: their JSON, their tables and plots, from runs made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import InvalidRequest
from baton.load.goals import Goal
from baton.load.plots import check_plot, plot
from baton.load.records import LoadOutcome, LoadRecord
from baton.load.results import SCHEMA, ClientReport, Found, LoadResults, Run, read_results, relabelled
from baton.load.tables import markdown

GOAL = Goal(ttft_s=0.4, tpot_s=0.02)
CLIENT = ClientReport(processes=2, late_p99_s=0.001, lag_p99_s=0.002, cpu_share=0.3, bound_s=0.01)


def record(index: int, ttft: float, gap: float) -> LoadRecord:
    times = tuple(ttft + number * gap for number in range(5))
    return LoadRecord(
        index, index / 10, 0.0005, 100, 6, LoadOutcome.OK, times[-1], times_s=times, counts=(1, 1, 1, 1, 2),
        usage={"prompt": 100, "cached": 16, "output": 6}, request_id=f"bench-1-{index}", receipt={"path": "remote"},
    )  # fmt: skip


def run(label: str, ttft: float, gap: float, *, failed: int = 0, rate: float = 10.0) -> Run:
    records = [record(index, ttft, gap) for index in range(20)]
    broken = [
        LoadRecord(20 + index, 1.0, 0.0, 100, 6, LoadOutcome.FAILED, 0.1, error="BrokenStream", detail="closed")
        for index in range(failed)
    ]
    return Run(
        label, f"{label}:7000", "grpc", "llama", "100 in, 6 out, poisson", rate, 0, "2026-11-22T12:00:00+00:00", CLIENT,
        [*records, *broken, replace(record(30, 9.0, 9.0), counted=False)],
    )  # fmt: skip


def test_json_has_every_request_and_reads_back(tmp_path: Path) -> None:
    results = LoadResults([run("a", 0.2, 0.01, failed=2)], [GOAL], command="baton bench a:7000")
    results.write(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["schema"] == SCHEMA
    assert len(found["runs"][0]["requests"]) == 23
    assert found["runs"][0]["good"] == [20]
    first = found["runs"][0]["requests"][0]
    assert (first["id"], first["ttft_ms"], first["tpot_ms"], first["tokens"]) == ("bench-1-0", 200.0, 8.0, 6)
    assert (first["counts"], first["times_ms"]) == ([1, 1, 1, 1, 2], [200.0, 210.0, 220.0, 230.0, 240.0])
    again = read_results(tmp_path / "a.json")
    assert markdown(again) == markdown(results)
    again.write(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text())["runs"][0]["requests"] == found["runs"][0]["requests"]


def test_a_run_without_its_records_keeps_its_numbers(tmp_path: Path) -> None:
    whole = run("a", 0.2, 0.01, failed=5)
    slim = whole.without_records([GOAL])
    assert slim.records == ()
    assert (slim.summary, slim.good([GOAL])) == (whole.summary, whole.good([GOAL]))
    results = LoadResults([slim], [GOAL])
    assert markdown(results) == markdown(LoadResults([whole], [GOAL]))
    results.write(tmp_path / "a.json")
    again = read_results(tmp_path / "a.json")
    assert again.runs[0] == slim
    found = Found("a", GOAL, 10.0, 1.0, 20, complete=True, at_most=True)
    plot(LoadResults([slim], [GOAL], [found]), tmp_path / "a.png")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "baton-bench/0"}', f'{{"schema": "{SCHEMA}"}}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"other\.json"):
        read_results(path)


def test_a_report_has_times_outcomes_and_goals() -> None:
    text = markdown(LoadResults([run("a", 0.2, 0.01, failed=5)], [GOAL, Goal(ttft_s=0.1)]))
    assert "| TTFT                    | 200.0 | 200.0 |" in text
    assert "25 requests: 20 answered, 5 failed (BrokenStream 5)" in text
    assert "ttft 400 ms, tpot 20 ms for 90 %: missed, 20 of 25 good (80.0 %)" in text
    assert "ttft 100 ms for 90 %: missed, 0 of 25 good" in text
    assert "33.3 % of tokens came together with others" in text
    assert "2 client processes, requests sent 1.0 ms late (p99)" in text
    assert "the client was the limit" not in text


def test_a_client_that_was_late_is_the_limit_and_the_cure_is_named() -> None:
    late = replace(run("a", 0.2, 0.01), client=replace(CLIENT, late_p99_s=0.05))
    text = markdown(LoadResults([late, run("a", 0.2, 0.01)]))
    assert "the client was the limit: 2 client processes, requests sent 50.0 ms late" in text
    assert "raise --processes" in text
    assert "in 1 of 2 runs" in text


def test_a_comparison_has_ratios_to_the_first_and_their_range_over_rounds() -> None:
    runs = [run("a", 0.2, 0.02), run("a", 0.1, 0.02), run("b", 0.1, 0.01, failed=20), run("b", 0.2, 0.01)]
    text = markdown(LoadResults(runs, [GOAL]))
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| ")}
    assert [cell.strip() for cell in rows["TPOT, mean of a request, p50, ms"]] == ["16.00", "8.00", "0.50x (0.50-0.50)"]
    assert rows["TTFT, p99, ms"][2].strip() == "1.00x (0.50-2.00)"
    assert [cell.strip() for cell in rows["good, ttft 400 ms, tpot 20 ms for 90 %, %"]][:2] == ["100.00", "66.67"]
    assert [cell.strip() for cell in rows["failed or not finished"]] == ["0", "20", ""]


def test_rates_are_a_table_by_deployment_and_goal() -> None:
    fast, slow = Goal(0.4, 0.01), Goal(0.4, 0.03)
    found = [
        Found("colocated", fast, 31.0, 0.93, 900, complete=True, at_most=True),
        Found("colocated", slow, 82.0, 0.91, 900, complete=True, at_most=True),
        Found("split", fast, 62.0, 0.92, 900, complete=True, at_most=True),
        Found("split", slow, 128.0, 1.0, 900, complete=False, at_most=False),
    ]
    lines = markdown(LoadResults([], [fast, slow], found)).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["requests/s", "ttft 400 ms, tpot 10 ms for 90 %", "ttft 400 ms, tpot 30 ms for 90 %"]
    assert cells[2] == ["colocated", "31", "82"]
    assert cells[3] == ["split", "62 (2.00x)", "at least 128 (1.56x) (not confirmed)"]


def test_plots_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    check_plot(path)
    runs = [run("a", 0.2, 0.02), run("b", 0.1, 0.01, rate=20.0)]
    plot(LoadResults(runs, [GOAL]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    found = [Found(label, GOAL, 10.0, 1.0, 20, complete=True, at_most=True) for label in "ab"]
    plot(LoadResults(runs, [GOAL], found), tmp_path / "b.png")
    assert (tmp_path / "b.png").stat().st_size > 10_000
    nothing = replace(runs[0], records=[record for record in runs[0].records if not record.counted])
    plot(LoadResults([nothing], [GOAL]), path)
    for wrong in (tmp_path / "a.svg", tmp_path / "missing" / "a.png"):
        with pytest.raises(InvalidRequest, match=r"is no PNG|cannot write"):
            check_plot(wrong)


def test_a_label_may_be_changed() -> None:
    found = Found("a", GOAL, 10.0, 1.0, 20, complete=True, at_most=True)
    changed = relabelled(LoadResults([run("a", 0.2, 0.02)], [GOAL], [found]), "b")
    assert changed.labels == [changed.found[0].label] == ["b"]
