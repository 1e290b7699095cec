"""Addresses of either family: where servers listen, and what processes advertise."""

import socket

import pytest

from baton.core.errors import ConfigError
from baton.rpc.server import ListenAddress, bindable_host, cannot_listen, why_taken
from baton.rpc.sockets import bind
from baton.settings.node_config import DecodeSettings
from tests.ipv6 import has_ipv6_loopback


@pytest.mark.parametrize(
    ("host", "ipv6", "bound"),
    [("[::]", True, "::"), ("[::]", False, "0.0.0.0"), ("[::1]", False, "::1"), ("0.0.0.0", True, "0.0.0.0")],
)
def test_every_address_of_a_machine_without_ipv6_is_every_ipv4_address(host: str, ipv6: bool, bound: str) -> None:
    assert bindable_host(host, ipv6=ipv6) == bound


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fd00::7:7001", "[fd00::7]:7001"),
        ("fd00:0:0:0:0:0:0:7:7001", "[fd00::7]:7001"),
        ("[fd00::7]:7001", "[fd00::7]:7001"),
        ("10.0.0.7:7001", "10.0.0.7:7001"),
        ("decode:7001", "decode:7001"),
        ("fd00::7", "fd00::7"),
        (None, None),
    ],
)
def test_an_advertised_ipv6_address_gets_its_brackets(given: str | None, meant: str | None) -> None:
    assert DecodeSettings(advertise=given).advertise == meant


def test_an_http_server_on_all_addresses_takes_connections_over_all_families_of_the_machine() -> None:
    bound = bind("[::]:0", field="metrics_listen")
    assert bound is not None
    with bound:
        for host in ("127.0.0.1", *(("::1",) if has_ipv6_loopback() else ())):
            socket.create_connection((host, bound.getsockname()[1]), timeout=60).close()


@pytest.mark.parametrize(
    ("listen", "cure"),
    [
        ("baton.invalid:0", "a name that it can resolve"),
        ("192.0.2.1:0", "give one of this machine"),  # an address for documentation, which no machine has
        ("{taken}", "the port may be in use"),
    ],
)
def test_an_address_where_nobody_can_listen_is_refused_with_the_cure_for_its_reason(listen: str, cure: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = listen.format(taken=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=f"cannot listen on {listen}: .*{cure}"):
            bind(listen, field="http_listen")
        error = why_taken(ListenAddress.parse(listen, field="listen"))
        assert cure in str(cannot_listen(listen, error, field="listen"))
