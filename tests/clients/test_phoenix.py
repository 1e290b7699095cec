"""Traces of a real cluster, as Arize Phoenix received them by OTLP and shows them in its own API."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.install import CLIENTS
from tests.integration.broken_steps import BAD_TOKEN, break_steps
from tests.integration.cluster import DEADLINE_S, machines

REMOTE, RETRIED = "0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "b7ad6b7169203331"
LOCAL_TOKENS = 20  # fewer than what decode nodes leave to prefill nodes

Spans = list[dict[str, Any]]


class Phoenix(NamedTuple):
    """Its addresses."""

    http: str
    otlp: str

    def spans(self, trace: str) -> Spans:
        """The spans of a trace; empty: it has received none of them."""
        url = f"{self.http}/v1/projects/default/spans?limit=1000&trace_id={trace}"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                found: Spans = json.load(answer)["data"]
        except urllib.error.HTTPError:  # the project comes with its first span
            return []
        return found

    def until(self, trace: str, complete: Callable[[Spans], bool]) -> Spans:
        """The spans as soon as they are complete: Phoenix writes them one after the other."""
        deadline = time.monotonic() + DEADLINE_S
        while not complete(found := self.spans(trace)):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    http, otlp = free_port(), free_port()
    place = tmp_path_factory.mktemp("phoenix")
    variables = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(otlp),
        "PHOENIX_WORKING_DIR": str(place),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "HOME": str(place),
    }
    log = place / "log"
    with log.open("w") as output:
        served = subprocess.Popen(
            [CLIENTS / "phoenix" / "bin" / "phoenix", "serve"],
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until_there(f"http://127.0.0.1:{http}/healthz", served, log)
        yield Phoenix(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{otlp}")
    finally:
        served.send_signal(signal.SIGTERM)
        try:
            served.wait(DEADLINE_S)
        finally:
            served.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until_there(url: str, served: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert served.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S):
                return
        except OSError:
            time.sleep(0.1)


def send_to(endpoint: str) -> None:
    os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_TRACES_SAMPLER_ARG="0")


@pytest.fixture(scope="module")
def served(phoenix: Phoenix, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A prompt that is handed over, and one whose first attempt a decode node loses."""
    breaks = partial(break_steps, tmp_path_factory.mktemp("steps") / "broken")
    with machines() as started:
        nodes = started.nodes(("prefill", {}), ("decode", {}), ("decode", {}), prepare=breaks)
        gateway = started.gateway(nodes[:1], nodes[1:], prepare=partial(send_to, phoenix.otlp))
        for trace, flags, prompt in ((REMOTE, "01", [7] * 200), (RETRIED, "00", [BAD_TOKEN] * LOCAL_TOKENS)):
            body = json.dumps({"model": "llama", "prompt": prompt, "max_tokens": 4}).encode()
            headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{CALLER}-{flags}"}
            url = f"{gateway.http}/v1/completions"
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=DEADLINE_S) as answer:
                assert answer.status == 200
        assert started.end(gateway) == 0  # what is held is sent first


@pytest.mark.usefixtures("served")
def test_it_shows_each_stage_of_a_request_below_the_one_that_it_is_part_of(phoenix: Phoenix) -> None:
    names = {
        "text_completion llama", "prepare", "queue", "attempt", "decode.reserve", "prefill", "prefill.queue",
        "prefill.chunk", "kv.send", "kv.transfer", "decode.admit", "decode",
    }  # fmt: skip
    spans = phoenix.until(REMOTE, lambda found: {span["name"] for span in found} >= names)
    by_id = {span["context"]["span_id"]: span["name"] for span in spans}
    (root,) = [span for span in spans if span["parent_id"] == CALLER]
    assert root["name"] == "text_completion llama"
    parents = {span["name"]: by_id[span["parent_id"]] for span in spans if span is not root}
    assert parents == {
        **dict.fromkeys(("prepare", "queue", "attempt"), root["name"]),
        **dict.fromkeys(("decode.reserve", "prefill", "kv.transfer", "decode.admit", "decode"), "attempt"),
        **dict.fromkeys(("prefill.queue", "prefill.chunk", "kv.send"), "prefill"),
    }
    assert all(root["start_time"] <= span["start_time"] <= span["end_time"] <= root["end_time"] for span in spans)
    assert {span["status_code"] for span in spans} == {"UNSET"}


@pytest.mark.usefixtures("served")
def test_it_reads_the_model_and_the_tokens_from_the_attributes(phoenix: Phoenix) -> None:
    spans = phoenix.until(REMOTE, lambda found: any(span["parent_id"] == CALLER for span in found))
    (root,) = [span for span in spans if span["parent_id"] == CALLER]
    attributes = root["attributes"]
    assert attributes["baton.path"] == "remote"
    assert attributes["baton.path_why"]
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    # These it makes itself of OpenTelemetry's conventions for generative AI.
    assert attributes["llm.token_count.prompt"] == 200
    assert attributes["llm.token_count.completion"] == 4


@pytest.mark.usefixtures("served")
def test_it_shows_a_lost_attempt_its_cause_and_the_retry(phoenix: Phoenix) -> None:
    """Its API has no links: the unit tests look at those."""
    spans = phoenix.until(RETRIED, lambda found: any(span["parent_id"] == CALLER for span in found))
    spans = phoenix.until(RETRIED, lambda found: len([span for span in found if span["name"] == "attempt"]) == 2)
    (root,) = [span for span in spans if span["parent_id"] == CALLER]
    lost, other = sorted((span for span in spans if span["name"] == "attempt"), key=lambda span: span["start_time"])
    assert (lost["status_code"], lost["attributes"]["error.type"]) == ("ERROR", "INTERNAL")
    assert other["status_code"] == "UNSET"
    (retry,) = [event for event in root["events"] if event["name"] == "retry"]
    assert retry["attributes"]["baton.retry.stage"] == "decode"
    assert retry["attributes"]["baton.retry.reason"] == lost["status_message"]
    assert root["attributes"]["baton.trace.kept_for"] == "retried"
    assert [span["parent_id"] for span in spans if span["name"] == "prefill.chunk"] == [
        span["context"]["span_id"] for span in spans if span["name"] == "prefill"
    ]
