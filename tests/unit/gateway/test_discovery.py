"""Addresses out of settings, names and files."""

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.rpc.server import Address
from gateway.discovery.directory import Directory
from gateway.discovery.sources import ListFile, ServicePort, parse_places


def test_addresses_are_separated_by_commas() -> None:
    parsed = parse_places(" a:1, b:2,,", field="prefill")
    assert parsed == (Address("a", 1), Address("b", 2))


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:b", "a:70000", ":::7", "::1:7000"])
def test_a_malformed_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="decode is"):
        parse_places(text, field="decode")


async def test_literal_addresses_are_not_looked_up() -> None:
    directory = Directory(parse_places("127.0.0.1:5,[::1]:6", field="decode"))
    assert await directory.look_up() == {"127.0.0.1:5", "[::1]:6"}


async def test_a_name_under_both_families_counts_once() -> None:
    directory = Directory(parse_places("localhost:5", field="decode"))
    assert await directory.look_up() == {"127.0.0.1:5"}


async def test_a_name_that_cannot_be_resolved_is_no_address() -> None:
    directory = Directory(parse_places("no-such-host.invalid:5", field="decode"))
    assert await directory.look_up() == frozenset()


def test_files_and_services_are_places_too() -> None:
    parsed = parse_places("file:///etc/nodes,k8s://ns/decode:grpc,k8s:///decode:7002,a:1", field="decode")
    assert parsed == (
        ListFile(Path("/etc/nodes")),
        ServicePort("ns", "decode", "grpc"),
        ServicePort("", "decode", 7002),
        Address("a", 1),
    )


@pytest.mark.parametrize(
    "text",
    [
        *("file://nodes", "file:", "k8s://decode:1", "k8s://a/b", "k8s://a/b:0", "k8s://a/b:70000", "k8s://a/b/c:1"),
        *("k8s://A/b:1", "k8s://a/b?x:1", "dns://a:1", "k8s://a/-b:grpc"),
    ],
)
def test_a_malformed_place_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="decode is"):
        parse_places(text, field="decode")


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("10.0.0.1:1  # rack 1\n\n# rack 2\n10.0.0.2:1, 10.0.0.3:1\n")
    directory = Directory(parse_places(f"file://{path}", field="decode"))
    assert await directory.look_up() == {"10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"}
    path.write_text("10.0.0.4:1\n")
    assert await directory.look_up() == {"10.0.0.4:1"}


async def test_a_file_that_cannot_be_read_keeps_its_last_addresses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodes"
    directory = Directory(parse_places(f"file://{path}", field="decode"))
    assert await directory.look_up() == frozenset()
    path.write_text("10.0.0.1:1")
    assert await directory.look_up() == {"10.0.0.1:1"}
    for text in (b"10.0.0.1:1\nno port\n", b"\xff\xfe"):
        path.write_bytes(text)
        assert await directory.look_up() == {"10.0.0.1:1"}
    path.unlink()
    assert await directory.look_up() == {"10.0.0.1:1"}
    assert await directory.look_up() == {"10.0.0.1:1"}
    assert len(caplog.records) == 4  # one for each reason
