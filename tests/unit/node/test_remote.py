"""The view that a node's first rank has of another rank's KV transfer."""

import asyncio
import socket

from baton.node.ranks.channel import Channel
from baton.node.ranks.messages import RankAnswer, Start
from baton.node.ranks.remote import RemoteTransfer
from baton.node.waiting import until

DEADLINE_S = 60.0


async def test_a_lost_rank_differs_from_a_silent_one() -> None:
    ours, theirs = socket.socketpair()
    transfer = RemoteTransfer(1, ours, 7, on_filled=lambda _: None, on_refused=lambda _: None)
    rank = await Channel.over(theirs)
    starting = asyncio.create_task(transfer.start())
    start = await rank.receive()
    assert isinstance(start, Start)
    rank.send(RankAnswer(start.number))
    await starting
    assert transfer.stuck(after_s=DEADLINE_S) == ""
    assert "rank 1 has sent nothing" in transfer.stuck(after_s=-1.0)
    await rank.close()
    assert await until(lambda: transfer.stuck(after_s=DEADLINE_S) == "rank 1 is gone", timeout_s=DEADLINE_S)
    await transfer.close()
