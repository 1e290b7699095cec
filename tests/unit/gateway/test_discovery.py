"""Addresses out of settings and names."""

import pytest

from baton.errors import ConfigError
from gateway.discovery import Directory, parse_addresses


def test_addresses_are_separated_by_commas() -> None:
    parsed = parse_addresses(" a:1, b:2,,", field="prefill")
    assert [(address.host, address.port) for address in parsed] == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:b", "a:70000"])
def test_a_malformed_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="decode is"):
        parse_addresses(text, field="decode")


async def test_literal_addresses_are_not_looked_up() -> None:
    directory = Directory(parse_addresses("127.0.0.1:5,[::1]:6", field="decode"))
    assert await directory.look_up() == {"127.0.0.1:5", "[::1]:6"}


async def test_a_name_under_both_families_counts_once() -> None:
    directory = Directory(parse_addresses("localhost:5", field="decode"))
    assert await directory.look_up() == {"127.0.0.1:5"}


async def test_a_name_that_cannot_be_resolved_is_no_address() -> None:
    directory = Directory(parse_addresses("no-such-host.invalid:5", field="decode"))
    assert await directory.look_up() == frozenset()
