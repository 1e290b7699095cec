"""Reads OpenTelemetry's standard variables about exporting traces. Pure: the variables are passed in."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from baton.core.errors import ConfigError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_CERTIFICATES = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT_NAME = "baton-gateway"

DEFAULT_RATIO = 0.1
_SAMPLER, _SAMPLER_ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
# The samplers that follow the caller's decision if there is one, and their share of all other requests; None: that of
# OTEL_TRACES_SAMPLER_ARG.
_BY_RATIO = "parentbased_traceidratio"
_SAMPLERS = {_BY_RATIO: None, "parentbased_always_on": 1.0, "parentbased_always_off": 0.0}

# What gRPC sends as text. Anything else raises an error with each call.
_HEADER_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True)
class TraceCollector:
    """The collector that traces go to.

    Attributes:
        target: host:port.
        tls: whether the endpoint is https.
        certificate: file with the CA of the collector; None: the system's.
        headers: sent with each call; they may be secret.
        resource: attributes of this process.
    """

    target: str
    tls: bool
    certificate: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    resource: Mapping[str, str] = field(default_factory=dict)


def read_collector(variables: Mapping[str, str], *, instance: str) -> TraceCollector | None:
    """The collector that traces go to. Returns None if they go nowhere.

    Args:
        instance: name of this process.

    Raises:
        ConfigError: gRPC cannot use the endpoint, the protocol or a header.
    """
    endpoint = _first(variables, _ENDPOINTS)
    if not endpoint or _switched_off(variables):
        return None
    protocol = _first(variables, _PROTOCOLS)
    if protocol not in ("", "grpc"):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}",
            field="OTEL_EXPORTER_OTLP_PROTOCOL",
            value=protocol,
            allowed=("grpc",),
            cure="name the collector's gRPC port, usually 4317",
        )
    target, tls = _target(endpoint)
    return TraceCollector(
        target=target,
        tls=tls,
        certificate=_first(variables, _CERTIFICATES) or None,
        headers=_headers(_first(variables, _HEADERS)),
        resource=_resource(variables, instance),
    )


def read_ratio(variables: Mapping[str, str]) -> float:
    """The share of requests without a caller's trace whose trace is exported.

    Raises:
        ConfigError: the sampler is none of ours, or its share is not a number from 0 to 1.
    """
    sampler = variables.get(_SAMPLER) or _BY_RATIO
    if sampler not in _SAMPLERS:
        raise ConfigError(
            f"{_SAMPLER} is {sampler}", field=_SAMPLER, value=sampler, allowed=tuple(_SAMPLERS), cure="leave it out"
        )
    fixed = _SAMPLERS[sampler]
    text = variables.get(_SAMPLER_ARG, "")
    if fixed is not None or not text:
        return DEFAULT_RATIO if fixed is None else fixed
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise ConfigError(f"{_SAMPLER_ARG} is {text}", field=_SAMPLER_ARG, value=text, allowed=("0 to 1",))
    return ratio


def _target(endpoint: str) -> tuple[str, bool]:
    """The host:port of an endpoint, and whether it is reached by TLS."""
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname or "", url.port or 4317
    except ValueError:
        host, port = "", 0
    if not host or url.scheme not in ("http", "https") or url.path not in ("", "/"):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is {endpoint}",
            field="OTEL_EXPORTER_OTLP_ENDPOINT",
            value=endpoint,
            allowed=("http://host:port", "https://host:port"),
            cure="name the collector's gRPC port, usually 4317",
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", url.scheme == "https"


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    found = tuple((name.lower(), value) for name, value in _pairs(text))
    for name, value in found:
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_HEADERS has the header {name!r}, which gRPC cannot send",
                field="OTEL_EXPORTER_OTLP_HEADERS",
                value=name,
                allowed=("name=value,name=value, of printable ASCII characters",),
                cure="name no header of gRPC's own (grpc-...) and no binary one (...-bin); percent-encode values once",
            )
    return found


def _switched_off(variables: Mapping[str, str]) -> bool:
    return variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or variables.get("OTEL_TRACES_EXPORTER") == "none"


def _resource(variables: Mapping[str, str], instance: str) -> dict[str, str]:
    found = {"service.name": _DEFAULT_NAME, "service.instance.id": instance}
    found |= dict(_pairs(variables.get("OTEL_RESOURCE_ATTRIBUTES", "")))
    if name := variables.get("OTEL_SERVICE_NAME"):
        found["service.name"] = name
    return found


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((variables[name] for name in names if variables.get(name)), "")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Reads `name=value,name=value`, percent-encoded; parts without this form are left out."""
    parts = (part.partition("=") for part in text.split(","))
    return [(name.strip(), unquote(value.strip())) for name, equals, value in parts if equals and name.strip()]
