"""Addresses out of settings, names and files."""

import asyncio
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.gateway.fleet.discovery import directory as directory_module
from baton.gateway.fleet.discovery.directory import Directory
from baton.gateway.fleet.discovery.sources import ADDRESSES_MAX, ListFile, ServicePort, parse_places
from baton.rpc.server import ListenAddress

BOUND_S = 60.0


def test_addresses_are_separated_by_commas() -> None:
    parsed = parse_places(" a:1, b:2,,", field="prefill")
    assert parsed == (ListenAddress("a", 1), ListenAddress("b", 2))


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:b", "a:70000", ":::7", "::1:7000"])
def test_a_malformed_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="decode is"):
        parse_places(text, field="decode")


async def test_literal_addresses_are_not_looked_up() -> None:
    directory = Directory(parse_places("127.0.0.1:5,[::1]:6", field="decode"))
    assert await directory.look_up() == {"127.0.0.1:5", "[::1]:6"}


async def test_a_name_under_both_families_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "_RESOLVE_S", BOUND_S)
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
        ListenAddress("a", 1),
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


async def test_a_name_that_takes_long_holds_up_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    own = socket.getaddrinfo

    def slow(host: str, *arguments: Any, **named: Any) -> Any:
        if host == "slow.invalid":
            assert answers.wait(BOUND_S)
            return own("127.0.0.3", *arguments, **named)
        return own(host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(directory_module, "_RESOLVE_S", 0.0)
    changed = asyncio.Event()
    async with Directory(parse_places("127.0.0.1:5,slow.invalid:6", field="decode"), changed.set) as directory:
        for _ in range(3):  # one question at a time for a name
            assert await directory.look_up() == {"127.0.0.1:5"}
        assert [thread.name for thread in threading.enumerate()].count("resolve slow.invalid") == 1
        answers.set()
        await asyncio.wait_for(changed.wait(), BOUND_S)
        monkeypatch.setattr(directory_module, "_RESOLVE_S", BOUND_S)
        assert await directory.look_up() == {"127.0.0.1:5", "127.0.0.3:6"}


async def test_too_many_addresses_in_a_file_are_refused_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodes"
    path.write_text("10.0.0.1:1\n")
    directory = Directory(parse_places(f"file://{path}", field="decode"))
    assert await directory.look_up() == {"10.0.0.1:1"}
    path.write_text("".join(f"10.0.0.1:{port}\n" for port in range(1, ADDRESSES_MAX + 2)))
    assert await directory.look_up() == {"10.0.0.1:1"}
    assert "its last 1 addresses stay: it lists 4097 addresses; allowed: at most 4096" in caplog.text
    path.write_text("x" * (2 << 20))
    assert await directory.look_up() == {"10.0.0.1:1"}
    assert "it has 2097152 bytes, of at most 1048576" in caplog.text


async def test_too_many_addresses_in_all_places_are_refused_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("".join(f"10.0.0.1:{port}\n" for port in range(1, ADDRESSES_MAX)))
    two.write_text("")
    directory = Directory(parse_places(f"file://{one},file://{two}", field="decode"))
    assert len(await directory.look_up()) == ADDRESSES_MAX - 1
    two.write_text("10.0.0.2:1\n10.0.0.2:2\n")
    for _ in range(2):
        assert len(await directory.look_up()) == ADDRESSES_MAX - 1
    assert len(caplog.records) == 1
    assert "4097 addresses are listed, but at most 4096 are allowed: the last 4095 stay" in caplog.text


def test_too_many_addresses_in_a_setting_are_refused() -> None:
    with pytest.raises(ConfigError, match="decode lists 4097 addresses; allowed: at most 4096"):
        parse_places(",".join(["10.0.0.1:1"] * (ADDRESSES_MAX + 1)), field="decode")


async def test_a_list_that_is_a_pipe_holds_up_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "nodes")
    directory = Directory(parse_places(f"file://{tmp_path}/nodes", field="decode"))
    assert await directory.look_up() == frozenset()
    assert "it is not a regular file" in caplog.text


async def test_a_list_may_have_a_path_of_any_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9\nx")
    path.write_text("10.0.0.1:1")
    directory = Directory(parse_places(f"file://{path}", field="decode"))
    assert await directory.look_up() == {"10.0.0.1:1"}
    path.write_text("no port")
    assert await directory.look_up() == {"10.0.0.1:1"}
    assert "its last 1 addresses stay" in caplog.text
