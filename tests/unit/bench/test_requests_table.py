"""The table of a run's requests: predicted and measured times, their difference by quantile and route."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from baton.load.records import LoadOutcome, LoadRecord
from baton.load.results import LoadResults, Run
from bench.requests_table import main, quantile_lines, to_cells
from tests.unit.load.test_results import CLIENT


def record(index: int, path: str, predicted_s: float, ttft_s: float) -> LoadRecord:
    times = (ttft_s + 0.002, ttft_s + 0.032, ttft_s + 0.042, ttft_s + 0.052)
    receipt = {
        "path": path, "prefill_node": "prefill-0", "decode_node": "decode-0", "queue_s": 0.010, "prefill_s": 0.050,
        "transfer_s": 0.015, "ttft_s": ttft_s, "predicted_ttft_s": predicted_s,
    }  # fmt: skip
    return LoadRecord(
        index, index / 10, 0.0, 100, 4, LoadOutcome.OK, times[-1], times_s=times, counts=(1, 1, 1, 1),
        usage={"prompt": 101, "cached": 16, "output": 4}, request_id=f"bench-0-{index}", receipt=receipt,
    )  # fmt: skip


def run(*records: LoadRecord) -> Run:
    return Run("a", "a:7000", "grpc", "llama", "100 in, 4 out", 10.0, 0, "2026-11-30T07:00:00+00:00", CLIENT, records)


FAILED = LoadRecord(8, 0.8, 0.0, 100, 4, LoadOutcome.FAILED, 0.1, error="BrokenStream", detail="closed")


def test_a_row_has_what_was_predicted_what_came_and_what_took_the_time() -> None:
    one = record(3, "remote", 0.060, 0.080)
    cells = to_cells(run(one), one)
    assert (cells["run"], cells["id"], cells["route"]) == ("a 10/s seed 0", "bench-0-3", "remote")
    assert (cells["prefill_node"], cells["decode_node"]) == ("prefill-0", "decode-0")
    assert (cells["prompt_tokens"], cells["cached_tokens"], cells["output_tokens"]) == (101, 16, 4)
    expected = {
        "due_ms": 300.0, "predicted_ttft_ms": 60.0, "gateway_ttft_ms": 80.0, "error": -0.25, "error_size": 0.25,
        "queue_ms": 10.0, "prefill_ms": 50.0, "rest_ms": 20.0, "transfer_ms": 15.0, "client_ttft_ms": 82.0,
        "step_ms": 50 / 3, "second_ms": 30.0, "gap_p99_ms": 29.6, "gap_max_ms": 30.0,
    }  # fmt: skip
    assert {name: cells[name] for name in expected} == pytest.approx(expected)


def test_a_request_without_an_answer_has_empty_cells_and_counts_nowhere() -> None:
    cells = to_cells(run(FAILED), FAILED)
    assert (cells["outcome"], cells["route"], cells["prompt_tokens"]) == ("failed", "", 100)
    assert {cells[name] for name in ("predicted_ttft_ms", "error", "rest_ms", "client_ttft_ms", "gap_max_ms")} == {None}
    assert len(list(quantile_lines([cells]))) == 2


def test_an_answer_of_another_server_has_times_and_no_prediction() -> None:
    other = replace(record(1, "", 0.0, 0.08), receipt={})
    cells = to_cells(run(other), other)
    assert (cells["error"], cells["client_ttft_ms"]) == (None, pytest.approx(82.0))


def test_quantiles_are_over_all_requests_and_over_each_route() -> None:
    routes = [record(index, "remote", 0.1 * (1 + index / 10), 0.1) for index in range(11)]
    routes += [record(20 + index, "local", 0.05, 0.1) for index in range(11)]
    one = run(*routes, FAILED)
    lines = list(quantile_lines([to_cells(one, each) for each in one.counted]))
    assert lines[0] == "| route | requests | | p50 | p90 | p99 |"
    assert "| remote | 11 | error | 50 % | 90 % | 99 % |" in lines
    assert "| local | 11 | error | -50 % | -50 % | -50 % |" in lines
    assert "| local | 11 | error_size | 50 % | 50 % | 50 % |" in lines
    assert "| all | 22 | gateway_ttft_ms | 100.0 | 100.0 | 100.0 |" in lines


def test_the_command_reads_results_prints_quantiles_and_writes_every_counted_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_up = replace(record(0, "remote", 0.1, 9.0), counted=False)
    LoadResults([run(warm_up, record(1, "remote", 0.06, 0.08), FAILED)]).write(tmp_path / "run.json")
    main([str(tmp_path / "run.json"), str(tmp_path / "table.csv")])
    assert "| all | 1 | error | -25 % | -25 % | -25 % |" in capsys.readouterr().out
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["error"], row["rest_ms"]) for row in rows] == [("bench-0-1", "-0.25", "20.0"), ("", "", "")]


def test_a_file_that_is_no_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(SystemExit, match="has the schema None"):
        main([str(path)])
    LoadResults([run()]).write(path)
    with pytest.raises(SystemExit, match="has no requests"):
        main([str(path)])
    with pytest.raises(SystemExit, match="give RUN"):
        main([])
