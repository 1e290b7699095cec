"""Parses a setting that lists nodes into places. Nothing is resolved, read or watched here."""

import re
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError
from baton.rpc.server import ListenAddress

# Limit for one setting. Each node costs every gateway a connection and a stream of statuses.
ADDRESSES_MAX = 4096

FORMS = ("host:port", "file:///path", "k8s://namespace/service:port")

_SERVICE = re.compile(r"k8s://(?P<namespace>[^/:]*)/(?P<service>[^/:]+):(?P<port>[^/:]+)")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # form of namespaces, services and port names


@dataclass(frozen=True)
class ListFile:
    """A file with one address per line. It may change at any time."""

    path: Path


@dataclass(frozen=True)
class ServicePort:
    """One port of a Kubernetes Service.

    Attributes:
        namespace: namespace of the Service; empty: that of this process.
        port: the port's name in the Service, or the number that its pods listen on.
    """

    namespace: str
    service: str
    port: str | int

    def __str__(self) -> str:
        return f"k8s://{self.namespace}/{self.service}:{self.port}"


Place = ListenAddress | ListFile | ServicePort


def parse_places(text: str, *, field: str) -> tuple[Place, ...]:
    """Parses a comma-separated setting.

    Raises:
        ConfigError: a place has none of the allowed forms, or there are too many.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > ADDRESSES_MAX:
        message = f"{field} lists {len(parts)} addresses"
        raise ConfigError(message, field=field, value=len(parts), allowed=(f"at most {ADDRESSES_MAX}",))
    return tuple(_parse_place(part, field) for part in parts)


def _parse_place(text: str, field: str) -> Place:
    if text.startswith("file://"):
        return _parse_file(text, field)
    if text.startswith("k8s://"):
        return _parse_service(text, field)
    if "://" in text:
        raise ConfigError(f"{field} is {text!r}", field=field, value=text, allowed=FORMS)
    return ListenAddress.parse(text, field=field)


def _parse_file(text: str, field: str) -> ListFile:
    path = Path(text.removeprefix("file://"))
    if not path.is_absolute() or "\0" in text:
        cure = "give an absolute path, with three slashes: file:///etc/baton/decode"
        raise ConfigError(f"{field} is {text!r}", field=field, value=text, cure=cure)
    return ListFile(path)


def _parse_service(text: str, field: str) -> ServicePort:
    match = _SERVICE.fullmatch(text)
    if match is None or not all(_NAME.fullmatch(name) for name in match.groups() if name):
        raise ConfigError(f"{field} is {text!r}", field=field, value=text, allowed=FORMS[2:])
    namespace, service, port = match.groups()
    if not port.isdigit():
        return ServicePort(namespace, service, port)
    if len(port) > 5 or not 0 < int(port) < 65536:
        raise ConfigError(f"{field} is {text!r}, with a bad port", field=field, value=text, allowed=("1 to 65535",))
    return ServicePort(namespace, service, int(port))
