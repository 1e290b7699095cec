"""Session streams: messages from gateways are delivered in order, messages to them are written in order."""

import asyncio
import itertools
import logging

import pytest

from baton.protos.internal.v1 import decode_pb2 as pb
from decode_node import gateway_sessions
from decode_node.events import Event, SessionClosed, SessionMessage, SessionOpened
from decode_node.gateway_sessions import GatewaySessions
from tests.unit.decode_node.streams import DEADLINE_S, Stream, until

SessionStream = Stream[pb.SessionRequest, pb.SessionResponse]


class Sessions:
    """The sessions of a node, and the events that they have delivered."""

    def __init__(self) -> None:
        self.delivered: list[Event] = []
        self.all = GatewaySessions(self.delivered.append, itertools.count(1))

    async def open(self, stream: SessionStream) -> "asyncio.Task[None]":
        opened = len(self.delivered) + 1
        task = asyncio.create_task(self.all.serve("gateway-0", stream.incoming, stream.write))
        await until(lambda: len(self.delivered) >= opened)
        return task


def cancel(key: int) -> pb.SessionRequest:
    return pb.SessionRequest(cancel=pb.CancelRequest(key=key))


def released(key: int) -> pb.SessionResponse:
    return pb.SessionResponse(released=pb.Released(key=key))


async def ended(task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(DEADLINE_S):
        await task


async def test_messages_are_delivered_in_order_between_open_and_close() -> None:
    sessions, stream = Sessions(), SessionStream()
    stream.send(cancel(1), cancel(2))
    stream.end()
    await ended(await sessions.open(stream))
    assert sessions.delivered == [
        SessionOpened(1),
        SessionMessage(1, cancel(1)),
        SessionMessage(1, cancel(2)),
        SessionClosed(1),
    ]


async def test_a_session_that_ends_writes_its_queued_messages_first() -> None:
    sessions, stream = Sessions(), SessionStream()
    task = await sessions.open(stream)
    sessions.all.send(1, released(1))
    sessions.all.send(1, released(2))
    sessions.all.end(1)
    sessions.all.send(1, released(3))
    await ended(task)
    assert stream.received() == [released(1), released(2)]
    assert sessions.delivered[-1] == SessionClosed(1)


async def test_numbers_are_not_used_twice_and_messages_to_closed_sessions_are_dropped() -> None:
    sessions = Sessions()
    for number in (1, 2):
        stream = SessionStream()
        stream.end()
        await ended(await sessions.open(stream))
        assert sessions.delivered[-1] == SessionClosed(number)
        sessions.all.send(number, released(1))
        sessions.all.end(number)
        assert stream.received() == []


async def test_a_stream_that_breaks_while_it_is_written_closes_its_session() -> None:
    sessions, stream = Sessions(), SessionStream()

    async def broken(response: pb.SessionResponse) -> None:
        raise ConnectionError("reset")

    task = asyncio.create_task(sessions.all.serve("gateway-0", stream.incoming, broken))
    await until(lambda: bool(sessions.delivered))
    sessions.all.send(1, released(1))
    with pytest.raises(ExceptionGroup):
        await ended(task)
    assert sessions.delivered[-1] == SessionClosed(1)


async def test_a_cancelled_stream_closes_its_session() -> None:
    sessions, stream = Sessions(), SessionStream()
    task = await sessions.open(stream)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    assert sessions.delivered[-1] == SessionClosed(1)


async def test_a_gateway_that_reads_nothing_loses_its_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_sessions, "_OUTBOX_MAX", 3)
    sessions, stream = Sessions(), SessionStream()
    task = await sessions.open(stream)
    with caplog.at_level(logging.WARNING, logger="baton"):
        for key in range(6):
            sessions.all.send(1, released(key))
    assert caplog.messages == ["gateway gateway-0 has not read 4 messages: its session ends"]
    await ended(task)
    assert stream.received() == [released(key) for key in range(4)]
