"""AIPerf's latencies and goodput of an open-loop load agree with the receipts of the same requests."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.config import DEMO_MODELS
from tests.clients.install import CLIENTS
from tests.integration.up import Up

REQUESTS = 60
OUTPUT_TOKENS = 16
# Objectives that a loaded machine meets for some requests and misses for others.
FIRST_TOKEN_MS, TOKEN_MS = 100.0, 20.0
CLOCK_MS = 1.0  # resolution of the gateway's clock


@pytest.fixture(scope="module")
def artifacts(cluster: Up, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aiperf")
    load = [
        "--request-rate",
        "8",
        "--arrival-pattern",
        "poisson",
        "--request-count",
        str(REQUESTS),
        "--random-seed",
        "1",
    ]
    shape = [
        "--isl",
        "64",
        "--osl",
        str(OUTPUT_TOKENS),
        "--extra-inputs",
        "ignore_eos:true",
        "--use-server-token-count",
    ]
    goal = ["--goodput", f"time_to_first_token:{FIRST_TOKEN_MS} inter_token_latency:{TOKEN_MS}"]
    record = ["--extra-inputs", "baton_receipt:true", "--export-level", "raw", "--artifact-dir", str(folder)]
    target = ["--url", str(cluster.line["http"]), "--model", "llama", "--tokenizer", str(DEMO_MODELS / "llama")]
    done = subprocess.run(
        [
            *(str(CLIENTS / "aiperf" / "bin" / "aiperf"), "profile", "--endpoint-type", "chat", "--streaming", *target),
            *(*load, *shape, *goal, *record, "--ui", "none", "--workers-max", "1", "--no-gpu-telemetry"),
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def measured(artifacts: Path) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """For each request what AIPerf measured, in ms, and its receipt."""
    receipts = {
        line["metadata"]["x_request_id"]: receipt(line) for line in lines(artifacts, "profile_export_raw.jsonl")
    }
    return [
        (metrics(line), receipts[line["metadata"]["x_request_id"]]) for line in lines(artifacts, "profile_export.jsonl")
    ]


def metrics(line: dict[str, Any]) -> dict[str, float]:
    """AIPerf's metrics, and the time to the stream's end: its own `request_latency` ends with the last token."""
    of_request = line["metadata"]
    duration_ms = (of_request["request_end_ns"] - of_request["request_start_ns"]) / 1e6
    return {name: metric["value"] for name, metric in line["metrics"].items()} | {"duration": duration_ms}


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def receipt(line: dict[str, Any]) -> dict[str, Any]:
    """The receipt in the raw events of one stream."""
    data = (packet["value"] for event in line["responses"] for packet in event["packets"])
    found = [json.loads(text)["baton"]["receipt"] for text in data if '"receipt"' in text]
    assert len(found) == 1
    assert isinstance(found[0], dict)
    return found[0]


def good(first_token_ms: float, token_ms: float) -> bool:
    return first_token_ms <= FIRST_TOKEN_MS and token_ms <= TOKEN_MS


def test_the_client_sees_what_the_receipt_says_and_the_way_to_it(
    measured: list[tuple[dict[str, float], dict[str, Any]]],
) -> None:
    assert len(measured) == REQUESTS
    for seen, said in measured:
        assert 1e3 * said["first_token_s"] <= seen["time_to_first_token"] + CLOCK_MS
        assert 1e3 * said["total_s"] <= seen["duration"] + CLOCK_MS
    more = [seen["time_to_first_token"] - 1e3 * said["first_token_s"] for seen, said in measured]
    print(f"to the first token AIPerf measures {np.median(more):.1f} ms more (median), {max(more):.1f} ms at most")


def test_goodput_of_the_receipts_is_aiperfs(
    artifacts: Path, measured: list[tuple[dict[str, float], dict[str, Any]]]
) -> None:
    summary = json.loads((artifacts / "profile_export_aiperf.json").read_text())
    theirs = [good(seen["time_to_first_token"], seen["inter_token_latency"]) for seen, _ in measured]
    assert sum(theirs) == summary["good_request_count"]["avg"]
    ours = [
        good(1e3 * said["first_token_s"], 1e3 * (said["total_s"] - said["first_token_s"]) / (OUTPUT_TOKENS - 1))
        for _, said in measured
    ]
    print(f"good requests: {sum(theirs)} by AIPerf, {sum(ours)} by receipts, of {REQUESTS}")
    assert abs(sum(theirs) - sum(ours)) <= 0.2 * REQUESTS
    goodput = summary["goodput"]["avg"]
    print(f"goodput {goodput:.2f} requests/s, {summary['request_throughput']['avg']:.2f} in all")
