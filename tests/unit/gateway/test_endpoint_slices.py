"""Endpoints of a Service: which of them count, and how they are followed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.gateway.fleet.discovery import cluster
from baton.gateway.fleet.discovery.directory import Directory
from baton.gateway.fleet.discovery.endpoint_slices import EndpointSlices
from baton.gateway.fleet.discovery.sources import parse_places
from tests.unit.gateway.api_server import ApiServer, api_server, endpoint, endpoint_slice


def addresses_of(*slices: dict[str, Any], port: str | int = "grpc") -> frozenset[str]:
    known = EndpointSlices(port)
    known.replace(slices)
    return known.addresses()


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),  # of a Service with publishNotReadyAddresses
        ({"serving": True}, True),  # ready is unknown
    ],
)
def test_an_endpoint_counts_while_it_is_ready_and_does_not_terminate(conditions: dict[str, bool], counts: bool) -> None:
    found = addresses_of(endpoint_slice("a", endpoint("10.0.0.1", **conditions)))
    assert found == ({"10.0.0.1:7002"} if counts else set())


def test_each_slice_has_its_own_number_of_a_named_port() -> None:
    found = addresses_of(
        endpoint_slice("a", endpoint("10.0.0.1")), endpoint_slice("b", endpoint("10.0.0.2"), port=7005)
    )
    assert found == {"10.0.0.1:7002", "10.0.0.2:7005"}


def test_a_slice_without_the_port_has_no_addresses() -> None:
    assert addresses_of(endpoint_slice("a", endpoint("10.0.0.1")), port="http") == frozenset()


def test_a_port_given_as_a_number_needs_no_name() -> None:
    bare = {**endpoint_slice("a", endpoint("10.0.0.1")), "ports": None}
    assert addresses_of(bare, port=9000) == {"10.0.0.1:9000"}


def test_a_pod_of_both_families_counts_once() -> None:
    six = endpoint_slice("b", endpoint("fd00::1"), family="IPv6")
    assert addresses_of(endpoint_slice("a", endpoint("10.0.0.1")), six) == {"10.0.0.1:7002"}
    assert addresses_of(six) == {"[fd00::1]:7002"}


def test_empty_fields_are_no_addresses() -> None:
    """The API leaves out what is empty, or sends null."""
    empty = {"addressType": "IPv4", "endpoints": None, "ports": None, "metadata": {"name": "a"}}
    gone = endpoint_slice("b", {"addresses": [], "conditions": None}, {"addresses": ["10.0.0.3"]})
    assert addresses_of(empty, gone, {}) == {"10.0.0.3:7002"}


def test_events_change_one_slice() -> None:
    known = EndpointSlices("grpc")
    known.replace([endpoint_slice("a", endpoint("10.0.0.1"))])
    known.apply("ADDED", endpoint_slice("b", endpoint("10.0.0.2"), endpoint("10.0.0.3")))
    known.apply("MODIFIED", endpoint_slice("b", endpoint("10.0.0.3")))
    known.apply("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "7"}})
    assert known.addresses() == {"10.0.0.1:7002", "10.0.0.3:7002"}
    known.apply("DELETED", endpoint_slice("a"))
    assert known.addresses() == {"10.0.0.3:7002"}


BOUND_S = 60.0


class Followed:
    """A directory of one Service, and the means to wait for its changes."""

    def __init__(self, text: str) -> None:
        self._changed = asyncio.Event()
        self.directory = Directory(parse_places(text, field="decode"), self._changed.set)

    async def until(self, *addresses: str) -> None:
        async with asyncio.timeout(BOUND_S):
            self._changed.clear()
            while await self.directory.look_up() != set(addresses):
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    monkeypatch.setattr(cluster, "_PAUSE_S_MIN", 0.001)
    async with api_server(tmp_path) as served:
        yield served


async def test_a_service_is_listed_and_then_watched(server: ApiServer) -> None:
    server.slices = [endpoint_slice("a", endpoint("10.0.0.1"))]
    followed = Followed("k8s://baton/baton-decode:grpc")
    async with followed.directory:
        await followed.until("10.0.0.1:7002")
        await server.until_watched()
        server.send("MODIFIED", endpoint_slice("a", endpoint("10.0.0.1"), endpoint("10.0.0.2")))
        await followed.until("10.0.0.1:7002", "10.0.0.2:7002")
        leaving = endpoint("10.0.0.1", ready=False, serving=True, terminating=True)
        server.send("MODIFIED", endpoint_slice("a", leaving, endpoint("10.0.0.2")))
        await followed.until("10.0.0.2:7002")
    assert server.asked[0].startswith("/apis/discovery.k8s.io/v1/namespaces/baton/endpointslices?")
    assert "labelSelector=kubernetes.io/service-name%3Dbaton-decode" in server.asked[0].replace("%2F", "/")
    assert "resourceVersion=100" in server.asked[1]


async def test_a_watch_that_ends_goes_on_from_its_last_version(server: ApiServer) -> None:
    followed = Followed("k8s://baton/baton-decode:7002")
    async with followed.directory:
        await server.until_watched()
        server.send("BOOKMARK", {"kind": "EndpointSlice"})
        server.end_watches()
        await server.until_watched()
        server.send("ADDED", endpoint_slice("a", endpoint("10.0.0.1")))
        await followed.until("10.0.0.1:7002")
    assert [("resourceVersion=101" in asked) for asked in server.asked] == [False, False, True]


@pytest.mark.parametrize("by_event", [True, False])
async def test_a_version_that_is_too_old_is_listed_anew(server: ApiServer, by_event: bool) -> None:
    followed = Followed("k8s://baton/baton-decode:7002")
    async with followed.directory:
        await server.until_watched()
        server.slices = [endpoint_slice("b", endpoint("10.0.0.9"))]
        if by_event:
            server.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            server.watchers.clear()
        else:
            server.refusals = [410]
            server.end_watches()
        await followed.until("10.0.0.9:7002")


async def test_errors_keep_the_last_addresses(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    server.slices = [endpoint_slice("a", endpoint("10.0.0.1"))]
    followed = Followed("k8s://baton/baton-decode:7002")
    async with followed.directory:
        await followed.until("10.0.0.1:7002")
        await server.until_watched()
        server.refusals = [500, 403, 403]
        server.slices = [endpoint_slice("a", endpoint("10.0.0.2"))]
        server.cut_watches()
        server.changed.clear()
        while server.refusals:
            assert await followed.directory.look_up() == {"10.0.0.1:7002"}
            await server.changed.wait()
            server.changed.clear()
        await followed.until("10.0.0.2:7002")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("may not list and watch" in text for text in warnings) == 1


async def test_a_slice_of_a_thousand_endpoints_is_one_event(server: ApiServer) -> None:
    hosts = [f"10.1.{number // 250}.{number % 250}" for number in range(1000)]
    listed = [{**endpoint(host), "targetRef": {"kind": "Pod", "name": "baton-decode-" + 200 * "x"}} for host in hosts]
    followed = Followed("k8s://baton/baton-decode:7002")
    async with followed.directory:
        await server.until_watched()
        server.send("ADDED", endpoint_slice("a", *listed))
        await followed.until(*(f"{host}:7002" for host in hosts))


async def test_without_a_namespace_it_is_the_one_of_the_context(server: ApiServer) -> None:
    followed = Followed("k8s:///baton-decode:7002")
    async with followed.directory:
        await server.until_watched()
    assert "/namespaces/of-context/" in server.asked[0]


async def test_without_a_cluster_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        async with Followed("k8s://baton/baton-decode:7002").directory:
            pass
