"""Messages between the processes of a node, between ends that block and ends on an event loop."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from baton.errors import BatonError, DataLoss, UnknownLease
from kvtransfer.leases import LeaseTotals
from node.ranks.channel import AsyncChannel, Channel

BIG = os.urandom(3 << 20)  # more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    channels = tuple(map(Channel, socket.socketpair()))
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()


def send_all(channel: Channel, messages: Sequence[object]) -> None:
    for message in messages:
        channel.send(message)


def test_messages_come_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    sent = [b"", {"a": (1, 2)}, BIG, LeaseTotals(7, 1, 2, 0.5), None]
    thread = threading.Thread(target=send_all, args=(ends[0], sent))
    thread.start()
    assert [ends[1].receive() for _ in sent] == sent
    thread.join()


def test_bytes_go_as_they_are(ends: tuple[Channel, Channel]) -> None:
    for message in (b"", b"step"):
        ends[0].send_bytes(message)
        assert ends[1].receive_bytes() == message


def test_the_end_of_one_is_the_end_of_the_file_for_the_other(ends: tuple[Channel, Channel]) -> None:
    ends[0].send("last")
    ends[0].close()
    assert ends[1].receive() == "last"
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(OSError, match="pipe"):
        ends[1].send("nobody hears it")


def test_an_end_in_the_middle_of_a_message_is_no_message(ends: tuple[Channel, Channel]) -> None:
    raw = ends[0].detach()
    raw.sendall((100).to_bytes(8, "little") + b"only so much")
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive_bytes()


@pytest.mark.parametrize(
    "error", [UnknownLease("lease 3 is not open", field="number", value=3), DataLoss("x", cure="y")]
)
def test_errors_of_ours_arrive_with_all_that_they_say(ends: tuple[Channel, Channel], error: BatonError) -> None:
    ends[0].send(error)
    arrived = ends[1].receive()
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert str(arrived) == str(error)


async def test_one_end_blocks_and_the_other_one_is_on_an_event_loop(ends: tuple[Channel, Channel]) -> None:
    blocking, channel = ends[0], await AsyncChannel.over(ends[1])
    sent = ["a", BIG, 3]
    for message in sent:
        channel.send(message)
    assert [await asyncio.to_thread(blocking.receive) for _ in sent] == sent
    sending = asyncio.create_task(asyncio.to_thread(send_all, blocking, sent))
    assert [await channel.receive() for _ in sent] == sent
    await sending
    channel.send("last")
    await channel.close()
    assert blocking.receive() == "last"
    with pytest.raises(EOFError):
        blocking.receive()


async def test_an_event_loop_hears_that_the_other_one_is_gone(ends: tuple[Channel, Channel]) -> None:
    channel = await AsyncChannel.over(ends[1])
    waiting = asyncio.create_task(channel.receive())
    await asyncio.sleep(0)
    ends[0].close()
    with pytest.raises(EOFError):
        await waiting
    channel.send("nobody hears it")
    await channel.close()
