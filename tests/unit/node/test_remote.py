"""The view that a node's first rank has of another rank's KV transfer."""

import asyncio
import math
import socket

import pytest

from baton.core.block_keys import BlockKey
from baton.core.errors import Cancelled, Draining
from baton.core.kv_entries import EntryBlocks, EntryKey, KeepTime
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.node.ranks.channel import Channel
from baton.node.ranks.messages import Cancel, LoadEntries, RankAnswer, Start
from baton.node.ranks.remote import RemoteTransfer
from baton.node.ranks.serving import TransferServer
from baton.node.waiting import until
from kvtransfer.rank_transfer import OnFilled, OnRefused
from kvtransfer.settings import TransferSettings
from kvtransfer.transfer import KVTransfer

DEADLINE_S = 60.0


ENTRIES = EntryBlocks((EntryKey(BlockKey(b"digest", b"tokens", b"root"), b"root", 0),), (0,))


async def started() -> tuple[RemoteTransfer, Channel]:
    """A transfer of a rank that has started, and that rank's end of the channel."""
    ours, theirs = socket.socketpair()
    transfer = RemoteTransfer(1, ours, 7, on_filled=lambda _: None, on_refused=lambda _: None)
    rank = await Channel.over(theirs)
    starting = asyncio.create_task(transfer.start())
    start = await rank.receive()
    assert isinstance(start, Start)
    rank.send(RankAnswer(start.number))
    await starting
    return transfer, rank


async def test_a_lost_rank_differs_from_a_silent_one() -> None:
    transfer, rank = await started()
    assert transfer.stuck(after_s=DEADLINE_S) == ""
    assert "rank 1 has sent nothing" in transfer.stuck(after_s=-1.0)
    await rank.close()
    assert await until(lambda: transfer.stuck(after_s=DEADLINE_S) == "rank 1 is gone", timeout_s=DEADLINE_S)
    await transfer.close()


async def test_a_cancelled_load_of_entries_returns_when_the_rank_has_ended_it() -> None:
    """Until then the rank writes to the blocks."""
    transfer, rank = await started()
    load = asyncio.create_task(transfer.load_entries(ENTRIES, timeout_s=DEADLINE_S))
    call = await rank.receive()
    assert call.verb == LoadEntries(ENTRIES, DEADLINE_S, math.inf)
    load.cancel()
    assert await rank.receive() == Cancel(call.number)
    assert not load.done()
    rank.send(RankAnswer(call.number, error=Cancelled("by its caller")))
    with pytest.raises(asyncio.CancelledError):
        await load
    await rank.close()
    await transfer.close()


async def test_calls_about_entries_of_a_rank_that_is_gone_are_errors() -> None:
    transfer, rank = await started()
    load = asyncio.create_task(transfer.load_entries(ENTRIES, timeout_s=DEADLINE_S))
    await rank.receive()
    await rank.close()
    with pytest.raises(Draining):
        await load
    for call in (
        transfer.save_entries(ENTRIES),
        transfer.find_entries(ENTRIES.keys),
        transfer.load_entries(ENTRIES, timeout_s=DEADLINE_S),
        transfer.keep_entries(ENTRIES.keys, KeepTime(1.0, 1)),
        transfer.drop_entries(ENTRIES.keys),
        transfer.drop_entries_of(frozenset({b"root"})),
    ):
        with pytest.raises(Draining, match="rank 1 is gone"):
            await call
    await transfer.close()


async def test_a_call_that_is_cancelled_before_it_begins_is_answered_too() -> None:
    ours, theirs = socket.socketpair()
    cache = PagedKVCache(
        KVCacheSpec(KVKind.MLA, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"),
        KVCacheShape(KVCacheLayout.LBNC, 16, 4),
    )
    settings = TransferSettings(
        incarnation=7, transport="loopback", segment_bytes=1000, staging_slots=1, digests=True, peers_are_known=True
    )

    def make(_: int, on_filled: OnFilled, on_refused: OnRefused) -> KVTransfer:
        return KVTransfer(cache, settings, on_filled=on_filled, on_refused=on_refused)

    serving = asyncio.create_task(TransferServer(1, make).serve(theirs))
    transfer = RemoteTransfer(1, ours, 7, on_filled=lambda _: None, on_refused=lambda _: None)
    await transfer.start()
    load = asyncio.create_task(transfer.load_entries(ENTRIES, timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    load.cancel()  # the rank reads call and cancellation together
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(asyncio.CancelledError):
            await load
    await transfer.close()
    await serving
