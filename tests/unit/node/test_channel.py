"""Calls and answers between the processes of a node, over the sockets that they inherit."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.core.errors import BatonError, DataLoss, InternalError, UnknownLease
from baton.node.ranks.channel import Channel
from baton.node.ranks.messages import Verb
from baton.node.ranks.serving import perform
from kvtransfer.leases import LeaseTotals
from kvtransfer.rank_transfer import RankTransfer

BIG = os.urandom(3 << 20)  # more than a socket holds


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Channel, Channel]]:
    one, other = [await Channel.over(end) for end in socket.socketpair()]
    yield one, other
    await one.close()
    await other.close()


async def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    sent = [b"", {"a": (1, 2)}, BIG, LeaseTotals(7, 1, 2, 0.5), None]
    for message in sent:
        ends[0].send(message)
    assert [await ends[1].receive() for _ in sent] == sent


async def test_closing_sends_queued_messages_and_then_the_end_of_the_file(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(BIG)
    closing = asyncio.create_task(ends[0].close())
    assert await ends[1].receive() == BIG
    await closing
    with pytest.raises(EOFError):
        await ends[1].receive()
    ends[1].send("never received")


async def test_an_end_in_the_middle_of_a_message_is_no_message() -> None:
    raw, end = socket.socketpair()
    channel = await Channel.over(end)
    raw.sendall((100).to_bytes(8, "little") + b"only so much")
    raw.close()
    with pytest.raises(EOFError):
        await channel.receive()
    await channel.close()


@pytest.mark.parametrize(
    "error", [UnknownLease("lease 3 is not open", field="number", value=3), DataLoss("x", cure="y")]
)
async def test_our_errors_arrive_with_all_their_attributes(ends: tuple[Channel, Channel], error: BatonError) -> None:
    ends[0].send(error)
    arrived = await ends[1].receive()
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert str(arrived) == str(error)


async def test_a_reader_that_waits_gets_the_end_of_the_file(ends: tuple[Channel, Channel]) -> None:
    waiting = asyncio.create_task(ends[1].receive())
    await asyncio.sleep(0)
    await ends[0].close()
    with pytest.raises(EOFError):
        await waiting


def test_every_verb_of_a_transfer_has_one_message() -> None:
    """Counters and stuck threads come with each heartbeat. `test_kv_ranks` performs every verb."""
    verbs = {name for name in vars(RankTransfer) if not name.startswith("_")}
    assert len(Verb.__subclasses__()) == len(verbs - {"start", "close", "counters", "stuck", "watch"})


def test_an_unknown_verb_is_refused() -> None:
    transfer: Any = None
    with pytest.raises(InternalError, match="a KV transfer has no verb"):
        perform(transfer, Verb())
