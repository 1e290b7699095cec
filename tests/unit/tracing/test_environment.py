"""OpenTelemetry's standard variables about traces."""

import pytest

from baton.core.errors import ConfigError
from baton.tracing.environment import DEFAULT_RATIO, TraceCollector, read_collector, read_ratio

ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"


def collector(endpoint: str = "", **variables: str) -> TraceCollector | None:
    return read_collector({ENDPOINT: endpoint} | variables, instance="gateway-1")


def target(**variables: str) -> str | None:
    found = collector(**variables)
    return None if found is None else found.target


def test_traces_go_nowhere_unless_an_endpoint_is_named() -> None:
    assert collector() is None
    assert read_collector({}, instance="gateway-1") is None


@pytest.mark.parametrize(
    ("endpoint", "where", "tls"),
    [
        ("http://collector:4317", "collector:4317", False),
        ("https://collector/", "collector:4317", True),
        ("http://[::1]:9", "[::1]:9", False),
    ],
)
def test_an_endpoint_names_host_port_and_tls(endpoint: str, where: str, tls: bool) -> None:
    found = collector(endpoint)
    assert found is not None
    assert (found.target, found.tls) == (where, tls)


def test_the_variable_for_traces_precedes_the_one_for_all_signals() -> None:
    assert target(**{ENDPOINT: "http://all:1", TRACES_ENDPOINT: "http://traces:2"}) == "traces:2"
    assert target(**{ENDPOINT: "http://all:1"}) == "all:1"


@pytest.mark.parametrize("switch", [{"OTEL_SDK_DISABLED": "TRUE"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_variables_switch_off_what_variables_switch_on(switch: dict[str, str]) -> None:
    assert target(**{ENDPOINT: "http://all:1"}, **switch) is None


@pytest.mark.parametrize(
    ("variables", "ratio"),
    [
        ({}, DEFAULT_RATIO),
        ({SAMPLER: "", RATIO: ""}, DEFAULT_RATIO),
        ({RATIO: "0"}, 0.0),
        ({SAMPLER: "parentbased_traceidratio", RATIO: "0.25"}, 0.25),
        ({SAMPLER: "parentbased_always_on", RATIO: "0.25"}, 1.0),
        ({SAMPLER: "parentbased_always_off"}, 0.0),
    ],
)
def test_the_sampler_decides_about_requests_without_a_callers_trace(variables: dict[str, str], ratio: float) -> None:
    assert read_ratio(variables) == ratio


@pytest.mark.parametrize("share", ["many", "nan", "-0.1", "1.1", "inf"])
def test_a_share_that_is_none_is_an_error(share: str) -> None:
    with pytest.raises(ConfigError, match=f"{RATIO} is {share}") as caught:
        read_ratio({RATIO: share})
    assert caught.value.allowed == ("0 to 1",)


def test_a_sampler_that_ignores_the_callers_decision_is_an_error_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=f"{SAMPLER} is always_on") as caught:
        read_ratio({SAMPLER: "always_on"})
    assert "parentbased_always_on" in caught.value.allowed


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4317",
        "http://",
        "http://collector:port",
        "http://collector:65536",
        "http://[::1",
        "http://collector:4318/v1/traces",
        "ftp://collector",
    ],
)
def test_a_wrong_endpoint_is_an_error_with_the_allowed_forms(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"{ENDPOINT} is") as caught:
        collector(endpoint)
    assert "http://host:port" in caught.value.allowed


def test_a_protocol_other_than_grpc_is_an_error() -> None:
    with pytest.raises(ConfigError, match="http/protobuf"):
        collector(**{ENDPOINT: "http://all:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    assert target(**{ENDPOINT: "http://all:1", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}) == "all:1"


def test_headers_are_decoded_and_not_shown() -> None:
    found = collector("http://c:1", OTEL_EXPORTER_OTLP_HEADERS="Api-Key=a%20secret, x=1,none")
    assert found is not None
    assert found.headers == (("api-key", "a secret"), ("x", "1"))
    assert "secret" not in repr(found)


@pytest.mark.parametrize("header", ["a b=1", "a=%0d%0ab", "a=%c3%a9", "grpc-x=1", "a-bin=1", ":path=1"])
def test_a_header_that_grpc_cannot_send_is_an_error_without_its_value(header: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        collector("http://c:1", OTEL_EXPORTER_OTLP_HEADERS=header)
    assert caught.value.value == header.partition("=")[0]


def test_the_resource_is_named_by_variables() -> None:
    attributes = "service.name=mine,deployment.environment=test%2C1"
    found = collector("http://c:1", OTEL_RESOURCE_ATTRIBUTES=attributes)
    assert found is not None
    assert found.resource == {
        "service.name": "mine",
        "service.instance.id": "gateway-1",
        "deployment.environment": "test,1",
    }
    named = collector("http://c:1", OTEL_RESOURCE_ATTRIBUTES=attributes, OTEL_SERVICE_NAME="other")
    assert named is not None
    assert named.resource["service.name"] == "other"
