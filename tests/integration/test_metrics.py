"""What Prometheus scrapes from real processes: every declared metric, with the values that known traffic leaves."""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import parser
from prometheus_client.samples import Sample

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.metrics.declared import ALL, BASE_LABELS, METRICS, SERVED_MODEL, metrics_of
from baton.metrics.metric import Metric, MetricKind, ProcessRole
from tests.integration.cluster import DEADLINE_S, machines, nothing_held, until_status
from tests.integration.generation import generate

PROMPT = list(range(1, 201))
TOKENS = 8


class Cluster(NamedTuple):
    gateway: Process
    prefill: Process
    decode: Process
    outputs: Path

    def of(self, role: ProcessRole) -> Process:
        return {ProcessRole.GATEWAY: self.gateway, ProcessRole.PREFILL: self.prefill, ProcessRole.DECODE: self.decode}[
            role
        ]


class Scraped:
    """The samples of one page."""

    def __init__(self, text: str) -> None:
        self.families = list(parser.text_string_to_metric_families(text))
        self._samples: list[Sample] = [sample for family in self.families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        found = [each.value for each in self._samples if each.name == name and labels.items() <= each.labels.items()]
        assert found, f"no series {name} {labels}"
        return sum(found)

    def samples(self, metric: Metric) -> list[Sample]:
        names = {metric.name}
        if metric.kind is MetricKind.HISTOGRAM:
            names = {f"{metric.name}{suffix}" for suffix in ("_bucket", "_sum", "_count")}
        return [sample for sample in self._samples if sample.name in names]


def read(url: str | None) -> str:
    assert url is not None
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def scrape(process: Process) -> Scraped:
    return Scraped(read(process.metrics))


def post(gateway: Process, body: Mapping[str, object]) -> int:
    """The status of a completion."""
    url, data = f"{gateway.http}/v1/completions", json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"})) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def metric_of(name: str) -> Metric:
    (found,) = [metric for metric in METRICS if metric.name == name]
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The state after three finished requests, two of them with one prompt, and two wrong requests of a client."""
    outputs = tmp_path_factory.mktemp("outputs")
    with machines() as started:
        prefill, decode = started.nodes(("prefill", {}), ("decode", {}))
        gateway = started.gateway([prefill], [decode], outputs=outputs, access_log="true", log_format="json")
        greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

        async def traffic() -> None:
            for prompt in (PROMPT, PROMPT, [7] * 64):
                await generate(gateway, prompt, greedy)
            await until_status(decode, nothing_held)
            await until_status(prefill, nothing_held)

        asyncio.run(traffic())
        assert post(gateway, {"model": "llama", "prompt": "text", "temperature": -1}) == 400
        assert post(gateway, {"model": "llama"}) == 400
        yield Cluster(gateway, prefill, decode, outputs)


@pytest.mark.parametrize("role", ALL)
def test_a_process_exports_every_metric_that_is_declared_for_it_and_no_other(
    cluster: Cluster, role: ProcessRole
) -> None:
    page = scrape(cluster.of(role))
    for metric in metrics_of(role):
        samples = page.samples(metric)
        assert samples, metric.name
        labels = {*BASE_LABELS, *(label.name for label in metric.labels)}
        for sample in samples:
            assert sample.labels.keys() - {"le"} == labels, sample
            assert sample.labels["role"] == role
            assert sample.labels["model_name"] == "llama"
        if metric.closed:
            assert len(samples) <= metric.series_max
        for label in metric.labels:
            if label.values:
                known = {"llama" if value == SERVED_MODEL else value for value in label.values}
                assert {sample.labels[label.name] for sample in samples} <= known
    exported = {family.name for family in page.families if family.name.startswith(("baton_", "gen_ai_"))}
    assert exported == {metric.name.removesuffix("_total") for metric in metrics_of(role)}


def test_a_gateway_counts_what_its_clients_got(cluster: Cluster) -> None:
    page = scrape(cluster.gateway)
    outcomes = {"finished": 3, "client_error": 1, "failed": 0, "cancelled": 0, "deadline": 0, "refused": 0}
    for outcome, count in outcomes.items():
        assert page.value("baton_requests_total", outcome=outcome) == count, outcome
        assert page.value("baton_e2e_request_latency_seconds_count", outcome=outcome) == count
    assert page.value("baton_http_errors_total", reason="INVALID_REQUEST") == 1
    assert page.value("baton_output_success_total", finish_reason="length") == 3
    assert page.value("baton_output_path_total") == 3
    assert page.value("baton_generation_tokens_total") == 3 * TOKENS
    assert page.value("baton_prompt_tokens_total") == 2 * len(PROMPT) + 64
    assert page.value("baton_time_to_first_token_seconds_count") == 3
    assert page.value("baton_inter_token_latency_seconds_count") == 3 * (TOKENS - 1)
    named = {"gen_ai_provider_name": "baton", "gen_ai_response_model": "llama"}
    assert page.value("gen_ai_server_request_duration_seconds_count", error_type="", **named) == 3
    assert page.value("gen_ai_server_request_duration_seconds_count", error_type="client_error") == 1
    assert page.value("gen_ai_server_time_to_first_token_seconds_count", **named) == 3
    assert page.value("gen_ai_server_time_per_output_token_seconds_count", **named) == 3
    assert page.value("baton_num_requests_running") == page.value("baton_num_requests_waiting") == 0
    assert page.value("baton_nodes", state="ready") == 2
    first, total = "baton_time_to_first_token_seconds_sum", "baton_e2e_request_latency_seconds_sum"
    assert 0 < page.value(first) <= page.value(total, outcome="finished")


def test_nodes_count_the_same_tokens_and_bytes(cluster: Cluster) -> None:
    gateway, prefill, decode = scrape(cluster.gateway), scrape(cluster.prefill), scrape(cluster.decode)
    handed_over = gateway.value("baton_output_path_total", path="remote")
    assert handed_over == gateway.value("baton_output_transfer_time_seconds_count") > 0
    sent = prefill.value("baton_kv_transfer_bytes_total", direction="sent")
    assert sent == decode.value("baton_kv_transfer_bytes_total", direction="received") > 0
    assert sent == prefill.value("baton_link_bytes_total") == decode.value("baton_link_bytes_total")
    assert decode.value("baton_kv_transfer_time_seconds_count") == handed_over
    # The first token of a prompt that was handed over is drawn on the prefill node.
    assert prefill.value("baton_generation_tokens_total") == handed_over
    assert decode.value("baton_generation_tokens_total") == 3 * TOKENS - handed_over
    for page in (prefill, decode):
        assert page.value("baton_kv_segments_refused_total") == 0
        assert page.value("baton_kv_blocks_leaked") == page.value("baton_kv_cache_usage_perc") == 0
        assert page.value("baton_pairs_ready") == 1
        assert page.value("baton_link_bandwidth_bytes_per_second") > 0
        (link,) = page.samples(metric_of("baton_link_info"))
        assert link.labels["transport"]
        steps = page.value("baton_engine_step_time_seconds_count")
        assert 0 < steps <= page.value("baton_engine_step_launches_total")
    assert prefill.value("baton_prefix_cache_hits_total") + decode.value("baton_prefix_cache_hits_total") > 0


def test_the_door_shows_what_the_port_shows(cluster: Cluster) -> None:
    at_the_door = Scraped(read(f"{cluster.gateway.http}/metrics"))
    assert at_the_door.value("baton_requests_total", outcome="finished") == 3


def test_no_page_has_a_prompt_or_a_token(cluster: Cluster) -> None:
    for role in ALL:
        assert not re.search(r"Write|text\b.*prompt", "".join(re.findall(r'"([^"]*)"', read(cluster.of(role).metrics))))


def test_the_access_log_has_one_json_object_for_each_request(cluster: Cluster) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:  # a thread writes the log
        written, _, _ = (cluster.outputs / "stderr").read_text().rpartition("\n")
        lines: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines()]
        requests = [line for line in lines if line["message"] == "request"]
        if len(requests) >= 4:
            break
        assert time.monotonic() < deadline_s, lines
    assert [line["outcome"] for line in requests] == ["finished"] * 3 + ["client_error"]
    for line in requests[:3]:
        assert line["completion_tokens"] == TOKENS
        assert line["request_id"]
        assert 0 < line["ttft_s"] <= line["total_s"]
    assert all(line["role"] == "gateway" and line["name"] == f"gateway@{cluster.gateway.address}" for line in requests)
    assert {metric.name for metric in METRICS}.isdisjoint(line["message"] for line in lines)
