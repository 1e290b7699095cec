"""What a gateway tells of a node that it has never heard."""

import asyncio
import logging

import pytest

from baton.config import DEMO_MODELS
from gateway.model import read_served_model
from gateway.node import DecodeNode


async def test_a_node_that_is_not_there_is_named_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    tried = asyncio.Semaphore(0)
    model = read_served_model(DEMO_MODELS / "llama", None)
    with caplog.at_level(logging.WARNING, logger="baton"):
        node = DecodeNode("127.0.0.1:1", model, on_change=tried.release)
        try:
            async with asyncio.timeout(30):
                for _ in range(3):
                    await tried.acquire()
        finally:
            await node.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "127.0.0.1:1 is not there, and is tried again and again: Connection refused"
