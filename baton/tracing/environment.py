"""Reads OpenTelemetry's standard variables about exporting traces. Pure: the variables are passed in."""

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


def read_collector(endpoint: str | None, variables: Mapping[str, str], *, instance: str) -> TraceCollector | None:
    """The collector that traces go to. Returns None if they go nowhere.

    Args:
        endpoint: the setting `otlp_endpoint`; None: what the variables say.
        instance: name of this process.

    Raises:
        ConfigError: gRPC cannot use the endpoint, the protocol or a header.
    """
    if endpoint == "off" or (endpoint is None and _switched_off(variables)):
        return None
    where = endpoint or _first(variables, _ENDPOINTS)
    if not where:
        return None
    protocol = _first(variables, _PROTOCOLS) if endpoint is None else ""
    if protocol not in ("", "grpc"):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}",
            field="otlp_endpoint",
            value=protocol,
            allowed=("grpc",),
            cure="name the collector's gRPC port, usually 4317",
        )
    target, tls = _target(where)
    return TraceCollector(
        target=target,
        tls=tls,
        certificate=_first(variables, _CERTIFICATES) or None,
        headers=_headers(_first(variables, _HEADERS)),
        resource=_resource(variables, instance),
    )


def _target(endpoint: str) -> tuple[str, bool]:
    """The host:port of an endpoint, and whether it is reached by TLS."""
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname or "", url.port or 4317
    except ValueError:
        host, port = "", 0
    if not host or url.scheme not in ("http", "https") or url.path not in ("", "/"):
        raise ConfigError(
            f"otlp_endpoint is {endpoint}",
            field="otlp_endpoint",
            value=endpoint,
            allowed=("http://host:port", "https://host:port", "off"),
            cure="name the collector's gRPC port, usually 4317",
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", url.scheme == "https"


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    found = tuple((name.lower(), value) for name, value in _pairs(text))
    for name, value in found:
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_HEADERS has the header {name!r}, which gRPC cannot send",
                field="otlp_endpoint",
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
