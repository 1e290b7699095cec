"""`baton bench` on real processes measures what the gateway reports."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.load.traces import TraceRequest, write_trace
from tests.integration.cluster import DEADLINE_S, Machines, machines

CLOCK_MS = 1.0  # resolution of the gateway's clock
SHAPE = ("--input", "64", "--output", "8", "--warmup", "0.2", "--processes", "1")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Process]:
    with machines() as started:
        prefill, decode = started.nodes(("prefill", {}), ("decode", {}))
        yield started.gateway([prefill], [decode])


def bench(*arguments: str, code: int = 0) -> str:
    """What it prints."""
    program = [sys.executable, "-c", "from baton.cli import main; main()", "bench"]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def http(gateway: Process) -> str:
    assert gateway.http is not None
    return gateway.http


async def finished(gateway: Process) -> int:
    async with OperatorClient(gateway.address) as client:
        return (await client.cluster_status()).requests_finished


async def finished_before(gateway: Process) -> int:
    """As `finished`, once the gateway has counted what an earlier client was answered, or has left."""
    async with asyncio.timeout(DEADLINE_S), OperatorClient(gateway.address) as client:
        while (status := await client.cluster_status()).requests_running:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0.02)
        return status.requests_finished


@pytest.mark.parametrize("api", ["grpc", "chat"])
def test_every_request_is_in_the_json_and_agrees_with_its_receipt(gateway: Process, tmp_path: Path, api: str) -> None:
    before = asyncio.run(finished_before(gateway))
    file = tmp_path / "run.json"
    address = gateway.address if api == "grpc" else http(gateway)
    text = bench(
        address, "--api", api, "--rate", "20", "--requests", "20", *SHAPE, "--slo", "ttft=60s", "--json", str(file)
    )
    assert "20 requests: 20 answered" in text
    assert "ttft 60 s for 90 %: met, 20 of 20 good" in text
    run: dict[str, Any] = json.loads(file.read_text())["runs"][0]
    assert (run["summary"]["ok"], run["good"], run["model"]) == (20, [20], "llama")
    requests = run["requests"]
    assert sum(each["counted"] for each in requests) == 20
    probes = {"grpc": 0, "chat": 3}[api]
    assert asyncio.run(finished_before(gateway)) - before == len(requests) + probes
    for each in requests:
        receipt = each["receipt"]
        assert receipt["path"] in ("remote", "local")
        assert 1e3 * receipt["ttft_s"] <= each["ttft_ms"] + CLOCK_MS
        assert 1e3 * receipt["total_s"] <= each["end_ms"] + CLOCK_MS
        assert each["tokens"] == each["usage"]["output"] == 8
        assert sum(each["counts"] or [1] * len(each["times_ms"])) == 8
        assert each["exact"]
        assert each["times_ms"] == sorted(each["times_ms"])
        if api != "chat":
            assert each["usage"]["prompt"] == 64
            assert each["usage"]["cached"] == 0  # no prompt has been there before


def test_deployments_take_turns_and_files_compare_as_they_do(gateway: Process, tmp_path: Path) -> None:
    file, plot = tmp_path / "both.json", tmp_path / "both.png"
    text = bench(
        "compare", f"rpc={gateway.address}", f"web={http(gateway)}", "--rate", "20", "--requests", "5", "--rounds", "2",
        *SHAPE, "--json", str(file), "--plot", str(plot),
    )  # fmt: skip
    assert "web / rpc" in text
    runs = json.loads(file.read_text())["runs"]
    assert [run["label"] for run in runs] == ["rpc", "rpc", "web", "web"]
    due = [[each["due_ms"] for each in run["requests"]] for run in runs]
    assert due[0] == due[2]  # the same load in a round
    assert due[1] == due[3] != due[0]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for label in ("rpc", "web"):
        of_one = json.loads(file.read_text())
        of_one["runs"] = [run for run in runs if run["label"] == label]
        (tmp_path / f"{label}.json").write_text(json.dumps(of_one))
    again = bench("compare", str(tmp_path / "rpc.json"), str(tmp_path / "web.json"))
    assert [line.split("|")[1] for line in again.splitlines()[:16]] == [
        line.split("|")[1] for line in text.splitlines()[:16]
    ]


def test_the_highest_rate_is_searched_for_several_goals(gateway: Process, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    text = bench(
        gateway.address, "--find-rate", "--rate", "20", "--requests", "4", "--slo", "ttft=0.001ms", "--slo", "ttft=60s",
        "--max-runs", "2", *SHAPE, "--json", str(file),
    )  # fmt: skip
    assert "ttft 60 s for 90 %" in text
    impossible, easy = json.loads(file.read_text())["found"]
    assert (impossible["rate"], impossible["complete"]) == (0.0, False)
    assert easy["rate"] == 20.0


def test_a_trace_is_replayed_with_its_prefixes(start: Machines, tmp_path: Path) -> None:
    # Room for one request: the second one waits for the first, and finds its prefix.
    prefill, decode = start.nodes(("prefill", {}), ("decode", {"num_blocks": 15}))
    gateway = start.gateway([prefill], [decode], local_policy="strict")
    trace, file = tmp_path / "trace.jsonl", tmp_path / "run.json"
    same = TraceRequest(0.0, 200, 4, (1, 2, 3), 64)
    write_trace(trace, [same, TraceRequest(2.0, 200, 4, (1, 2, 4), 64), TraceRequest(3.0, 9000, 4)])
    flags = ("--speed", "4", "--warmup", "0", "--connections", "1")
    bench(gateway.address, "--trace", str(trace), *flags, "--json", str(file))
    one, two = json.loads(file.read_text())["runs"][0]["requests"]  # the third is longer than the model's context
    assert [each["due_ms"] for each in (one, two)] == [0.0, 500.0]
    assert one["usage"]["cached"] == 0
    assert two["usage"]["cached"] == 128


@pytest.mark.parametrize(("number", "whole_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_ends_the_clients_and_shows_what_was_measured(
    gateway: Process, tmp_path: Path, number: int, whole_group: bool
) -> None:
    file = tmp_path / "run.json"
    before = asyncio.run(finished_before(gateway))
    with subprocess.Popen(
        [sys.executable, "-m", "baton.load", gateway.address, "--rate", "10", *SHAPE, "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        asyncio.run(until_finished(gateway, before + 12))  # seven more than the warm-up may have
        children = psutil.Process(running.pid).children(recursive=True)
        assert children
        (os.killpg if whole_group else os.kill)(running.pid, number)
        shown, errors = running.communicate(timeout=DEADLINE_S)
        assert running.returncode == 130, errors
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert alive == []
    assert "| TTFT " in shown
    assert "stopped early: " in shown
    assert "not finished" not in shown
    run = json.loads(file.read_text())["runs"][0]
    assert {request["outcome"] for request in run["requests"]} == {"ok"}


def test_a_signal_before_the_first_answer_is_one_line(gateway: Process) -> None:
    command = [sys.executable, "-m", "baton.load", gateway.address, "--rate", "10", "--warmup", "600", *SHAPE[:4]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert "requests" in running.stderr.readline()  # the first run has been planned
        running.send_signal(signal.SIGTERM)
        shown, errors = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, shown) == (130, "")
    assert errors == "baton: stopped before a request of the measurement had ended\n"


async def until_finished(gateway: Process, wanted: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await finished(gateway) < wanted:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0.05)
