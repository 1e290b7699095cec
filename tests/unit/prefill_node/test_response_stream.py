"""Responses are written in order, at the gateway's pace; an error does not wait for a gateway that does not read."""

import asyncio

import pytest

from baton.core.errors import Cancelled
from baton.protos.internal.v1 import prefill_pb2 as pb
from prefill_node.driver import ResponseStream


def progress(computed_tokens: int) -> pb.PrefillEvent:
    return pb.PrefillEvent(progress=pb.PrefillProgress(computed_tokens=computed_tokens))


async def test_every_response_is_written_before_the_end() -> None:
    stream = ResponseStream()
    for tokens in (1, 2, 3):
        stream.put(progress(tokens))
    stream.end(None)
    written: list[pb.PrefillEvent] = []

    async def write(event: pb.PrefillEvent) -> None:
        written.append(event)

    await stream.write_all(write)
    assert written == [progress(1), progress(2), progress(3)]


async def test_an_error_ends_a_write_that_a_slow_gateway_holds_up() -> None:
    stream = ResponseStream()
    stream.put(progress(1))
    begun = asyncio.Event()

    async def write(event: pb.PrefillEvent) -> None:
        begun.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(stream.write_all(write))
    await begun.wait()
    stream.end(Cancelled("taken back"))
    with pytest.raises(Cancelled, match="taken back"):
        await writing


async def test_a_write_that_fails_ends_the_writing_of_a_stream_that_goes_on() -> None:
    stream = ResponseStream()
    stream.put(progress(1))

    async def write(event: pb.PrefillEvent) -> None:
        raise ConnectionError

    with pytest.raises(ExceptionGroup):
        await stream.write_all(write)
