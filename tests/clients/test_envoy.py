"""A real Envoy asks the endpoint picker, in front of two real gateways of one cluster."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import Process
from tests.clients.install import CLIENTS
from tests.integration.cluster import DEADLINE_S, Machines, arguments, machines
from tests.warm import launch_warm

ENVOY = CLIENTS / "envoy" / "bin" / "envoy"
ENDPOINT = "x-gateway-destination-endpoint"
EXTENSIONS = "type.googleapis.com/envoy.extensions"
# How a proxy may send bodies, and where it may read the picker's answer.
LISTENERS = ("duplex", "buffered")
SOURCES: dict[str, dict[str, Any]] = {
    "duplex": {"metadata": {"key": "envoy.lb", "path": [{"key": ENDPOINT}]}},
    "buffered": {"header": ENDPOINT},
}
MODES = {
    "duplex": {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    },
    "buffered": {"request_body_mode": "BUFFERED", "response_header_mode": "SEND"},
}


def socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def cluster(name: str, addresses: list[str], **more: object) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": socket_address(each)}} for each in addresses]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "60s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        **more,
    }


def gateways(name: str, addresses: list[str]) -> dict[str, Any]:
    """The gateways; requests go to the ones that the picker names."""
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{EXTENSIONS}.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    named = {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{EXTENSIONS}.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [SOURCES[name]],
            "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
        },
    }
    return cluster(name, addresses, load_balancing_policy={"policies": [{"typed_extension_config": named}]})


def listener(name: str) -> dict[str, Any]:
    # Lists what a client allows, as a proxy with subsets does.
    subset = {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": f"{EXTENSIONS}.filters.http.header_to_metadata.v3.Config",
            "request_rules": [
                {
                    "header": "x-allowed",
                    "on_header_present": {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "key": f"{ENDPOINT}-subset",
                        "type": "STRING",
                    },
                }
            ],
        },
    }
    ask = {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
            "message_timeout": "600s",
            "processing_mode": MODES[name],
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{EXTENSIONS}.filters.http.router.v3.Router"},
    }
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": name,
            "timeout": "0s",
            "retry_policy": {"retry_on": "connect-failure,reset", "num_retries": 3},
        },
        "response_headers_to_add": [
            {"header": {"key": "x-served-by", "value": "%UPSTREAM_REMOTE_ADDRESS%"}},
            {"header": {"key": "x-picked", "value": f"%REQ({ENDPOINT})%"}},
        ],
    }
    manager = {
        "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": [route]}]},
        "http_filters": [subset, ask, router],
    }
    return {
        "name": name,
        "address": socket_address("127.0.0.1:0"),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def configuration(picker: str, addresses: list[str]) -> dict[str, Any]:
    http2 = {
        "@type": f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    return {
        "admin": {"address": socket_address("127.0.0.1:0")},
        "static_resources": {
            "listeners": [listener(name) for name in LISTENERS],
            "clusters": [
                cluster("picker", [picker], typed_extension_protocol_options=options),
                *(gateways(name, addresses) for name in LISTENERS),
            ],
        },
    }


@contextmanager
def envoy(folder: Path, picker: str, addresses: list[str]) -> Iterator[dict[str, str]]:
    """A running Envoy: the URL of each listener by its name."""
    config, admin = folder / "envoy.json", folder / "admin"
    config.write_text(json.dumps(configuration(picker, addresses)))
    command = [ENVOY, "--config-path", config, "--admin-address-path", admin, "--concurrency", "1"]
    with (folder / "envoy.log").open("wb") as log:
        running = subprocess.Popen([*map(str, command), "--use-dynamic-base-id"], stdout=log, stderr=log)
    try:
        until(lambda: admin.is_file() and bool(admin.read_text()), running)
        url = f"http://{admin.read_text()}/listeners?format=json"
        until(lambda: len(listeners(url)) == len(LISTENERS), running)
        yield listeners(url)
    finally:
        running.kill()
        running.wait()


def listeners(url: str) -> dict[str, str]:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            found = json.load(answer).get("listener_statuses", [])
    except OSError:
        return {}
    return {each["name"]: f"http://127.0.0.1:{each['local_address']['socket_address']['port_value']}" for each in found}


def until(condition: Callable[[], bool], running: "subprocess.Popen[bytes] | None" = None) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert running is None or running.poll() is None, "envoy has ended: see envoy.log"
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@dataclass(frozen=True)
class Answer:
    """Envoy's answer to one request.

    Attributes:
        served_by: which gateway Envoy sent the request to.
        picked: the picker's answer.
    """

    status: int
    body: bytes
    served_by: str
    picked: list[str]


def post(url: str, body: bytes, **headers: str) -> Answer:
    """Header names have _ for -."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, {"content-type": "application/json", **given})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            status, found, data = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, found, data = error.code, error.headers, error.read()
    return Answer(status, data, found.get("x-served-by", ""), found.get("x-picked", "").split(","))


def chat(url: str, *texts: str, **headers: str) -> Answer:
    """Asks for two tokens of a conversation, whose texts alternate between user and assistant."""
    messages = [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    return post(f"{url}/v1/chat/completions", json.dumps(body).encode(), **headers)


@dataclass(frozen=True)
class Front:
    """Envoy, the picker and two gateways."""

    machines: Machines
    gateways: dict[str, Process]  # by the address of its HTTP server
    picker: Process
    urls: dict[str, str]

    def ready(self) -> int:
        """How many gateways the picker sees ready."""
        with urllib.request.urlopen(str(self.picker.metrics), timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        (line,) = [each for each in lines if each.startswith("baton_picker_gateways{") and 'state="ready"' in each]
        return int(float(line.split()[-1]))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with machines() as started:
        prefill, decode = started.nodes(("prefill", {}), ("decode", {}))
        both = [started.gateway([prefill], [decode]) for _ in range(2)]
        by_address = {str(each.http).removeprefix("http://"): each for each in both}
        started.processes.launch = launch_warm
        flags = {"pool": ",".join(by_address), "poll_s": 0.05, "stale_s": 2 * DEADLINE_S}
        picker = started.processes.start("baton.gateway.picker", arguments(flags))
        started.processes.wait_ready([picker])
        with envoy(tmp_path_factory.mktemp("envoy"), picker.address, list(by_address)) as urls:
            front = Front(started, by_address, picker, urls)
            until(lambda: front.ready() == 2)
            yield front


@pytest.mark.parametrize("name", LISTENERS)
def test_requests_reach_the_gateway_that_was_picked(front: Front, name: str) -> None:
    answers = [chat(front.urls[name], f"question {number}") for number in range(24)]
    assert {each.status for each in answers} == {200}
    assert all(each.served_by == each.picked[0] for each in answers)
    assert {each.served_by for each in answers} == set(front.gateways)
    assert all(set(each.picked) == set(front.gateways) for each in answers)


def test_a_conversation_stays_with_its_gateway_through_any_listener(front: Front) -> None:
    for question in ("one", "two", "three", "four"):
        turns = [(question,), (question, "an answer", "and then?")]
        served = {chat(front.urls[name], *texts).served_by for name in LISTENERS for texts in turns}
        assert len(served) == 1


@pytest.mark.parametrize("name", LISTENERS)
def test_the_subset_of_the_proxy_is_honoured(front: Front, name: str) -> None:
    for address in front.gateways:
        for number in range(4):
            answer = chat(front.urls[name], f"subset {number}", x_allowed=address)
            assert (answer.status, answer.served_by, answer.picked) == (200, address, [address])
    refused = chat(front.urls[name], "subset", x_allowed="127.0.0.1:1")
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (503, "no_node")


@pytest.mark.parametrize("name", LISTENERS)
def test_a_client_cannot_choose_where_its_request_goes(front: Front, name: str) -> None:
    answer = chat(front.urls[name], "mine", **{ENDPOINT: "127.0.0.1:1"})
    assert answer.status == 200
    assert set(answer.picked) == set(front.gateways)


@pytest.mark.parametrize("name", LISTENERS)
def test_a_stream_passes_as_the_gateway_sends_it(front: Front, name: str) -> None:
    body = {"prompt": "once", "max_tokens": 48, "temperature": 0, "stream": True, "ignore_eos": True}
    streams = [
        [line for line in post(f"{url}/v1/completions", json.dumps(body).encode()).body.split(b"\n\n") if line]
        for url in (front.urls[name], f"http://{next(iter(front.gateways))}")
    ]
    texts = [
        "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line[6:])["choices"])
        for lines in streams
    ]
    assert texts[0] == texts[1] != ""
    assert all(lines[-1] == b"data: [DONE]" for lines in streams)
    assert len(streams[0]) > 2


@pytest.mark.parametrize(("name", "size"), [("duplex", 2_000_000), ("buffered", 500_000)])
def test_a_long_body_arrives_whole(front: Front, name: str, size: int) -> None:
    body = b'{"add_special_tokens": false,' + b" \n\t " * (size // 4) + b'"prompt": "to the end"}'
    direct = f"http://{next(iter(front.gateways))}"
    proxied, expected = (post(f"{url}/tokenize", body) for url in (front.urls[name], direct))
    assert proxied.status == 200
    assert proxied.body == expected.body


@pytest.mark.parametrize("name", LISTENERS)
@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[]", b'{"messages": 7}'])
def test_a_malformed_body_is_the_gateways_to_refuse(front: Front, name: str, body: bytes) -> None:
    answer = post(f"{front.urls[name]}/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.served_by in front.gateways


def test_a_dead_gateway_is_avoided_and_without_any_there_is_an_answer(front: Front) -> None:
    """The last test: it ends both gateways."""
    first, second = front.gateways
    front.machines.kill(front.gateways[first])
    # Before the picker knows, Envoy goes on to the second address of its answer.
    for name in LISTENERS:
        for number in range(6):
            answer = chat(front.urls[name], f"after {number}")
            assert (answer.status, answer.served_by) == (200, second)
    until(lambda: front.ready() == 1)
    for name in LISTENERS:
        assert chat(front.urls[name], "known").picked == [second]
    front.machines.kill(front.gateways[second])
    until(lambda: front.ready() == 0)
    for name in LISTENERS:
        answer = chat(front.urls[name], "none")
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "no_node")
