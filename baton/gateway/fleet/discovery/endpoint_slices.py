"""Collects the addresses that take requests from the EndpointSlices of one Service. Pure: events in, addresses out.

Objects are those of the Kubernetes API, discovery.k8s.io/v1, as JSON. Unknown fields and forms are ignored.
"""

from collections.abc import Iterable, Mapping
from typing import Any

_FAMILIES = ("IPv4", "IPv6")

Slice = Mapping[str, Any]


class EndpointSlices:
    """All slices of one Service, and the addresses of one of its ports.

    Args:
        port: the port's name in the Service, or the number that pods listen on.
    """

    def __init__(self, port: str | int) -> None:
        self._port = port
        self._slices: dict[str, Slice] = {}  # by name

    def replace(self, slices: Iterable[Slice]) -> None:
        """Replaces all slices by a new list."""
        self._slices = {_name(each): each for each in slices}

    def apply(self, kind: str, changed: Slice) -> None:
        """Applies one event of a watch: ADDED, MODIFIED or DELETED. Other kinds are ignored."""
        if kind == "DELETED":
            self._slices.pop(_name(changed), None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[_name(changed)] = changed

    def addresses(self) -> frozenset[str]:
        """host:port of every endpoint that takes new requests.

        A terminating endpoint never does, whatever its other conditions are: it only finishes its requests. If there
        are IPv4 addresses, IPv6 addresses are left out, so a pod with both counts once.
        """
        by_family = {family: frozenset(self._of_family(family)) for family in _FAMILIES}
        return by_family["IPv4"] or by_family["IPv6"]

    def __len__(self) -> int:
        return len(self._slices)

    def _of_family(self, family: str) -> Iterable[str]:
        for each in self._slices.values():
            number = self._number(each) if each.get("addressType") == family else None
            if number is None:
                continue
            for endpoint in each.get("endpoints") or ():
                hosts = endpoint.get("addresses") or ()
                if hosts and _takes_requests(endpoint.get("conditions") or {}):
                    host = hosts[0]  # the others belong to the same endpoint
                    yield f"[{host}]:{number}" if ":" in host else f"{host}:{number}"

    def _number(self, each: Slice) -> int | None:
        """The port's number in this slice; it may differ between slices. Returns None if the slice has no such port."""
        if isinstance(self._port, int):
            return self._port
        for port in each.get("ports") or ():
            if (port.get("name") or "") == self._port and port.get("port"):
                return int(port["port"])
        return None


def _takes_requests(conditions: Mapping[str, Any]) -> bool:
    """Whether an endpoint takes new requests. An unknown condition counts as ready.

    A terminating pod is never ready (KEP 1672), although a Service with `publishNotReadyAddresses` reports it as ready.
    """
    return conditions.get("ready") is not False and conditions.get("terminating") is not True


def _name(each: Slice) -> str:
    return str((each.get("metadata") or {}).get("name"))
