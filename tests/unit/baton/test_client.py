"""Failures on the client's side are typed errors with a cure."""

import math
from collections.abc import AsyncIterator

import pytest

from baton.client.client import Client
from baton.core.errors import InvalidRequest, NoNode
from baton.rpc.server import GrpcServer


@pytest.fixture
async def no_gateway() -> AsyncIterator[str]:
    """The address of a server without the Generation service, such as a node."""
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        await server.start([])
        yield server.address


async def test_text_that_is_not_unicode_is_an_invalid_request() -> None:
    async with Client("127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest, match="UTF-8") as caught:
            await client.complete("an argument in Latin-1: \udce9")
        assert caught.value.field == "prompt"
        with pytest.raises(InvalidRequest) as caught:
            await client.complete("x", request_id="\ud800")
        assert caught.value.field == "request_id"
        with pytest.raises(InvalidRequest):
            await client.tokenize("\ud800")


@pytest.mark.parametrize("timeout_s", [None, 1e10, math.inf])
async def test_the_address_of_a_node_is_an_error_for_every_timeout(no_gateway: str, timeout_s: float | None) -> None:
    async with Client(no_gateway) as client:
        with pytest.raises(NoNode, match="is not a gateway; give the address of a gateway"):
            await client.complete("x", timeout_s=timeout_s)


async def test_a_priority_that_is_no_32_bit_number_is_an_invalid_request() -> None:
    async with Client("127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest, match="priority is 2147483648") as caught:
            await client.complete("x", priority=2**31)
    assert caught.value.field == "priority"
