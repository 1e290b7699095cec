"""Operations on cache and staging that run asynchronously, as a GPU's kernels do, keep their slot, blocks and lease
until they end, even if the lease or the link ends first. The in-process transport delivers messages at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.core.errors import Cancelled, DataLoss, Draining
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from kvtransfer import worker
from kvtransfer.leases import LeaseGrant
from kvtransfer.movers.mover import MoveDone
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import (
    DEADLINE_S,
    GQA,
    PEER,
    PREFILL_INCARNATION,
    SENDER,
    NodeEvents,
    as_bytes,
    connect,
    eventually,
    job,
    make_cache,
    make_transfer,
    plant,
    scattered_blocks,
    tokens_of,
)
from tests.conformance.late import Script, late

TOKENS = 20
# Two layers in the first segment, one in the second.
SEGMENT_BYTES = 2 * TOKENS * GQA.bytes_per_token_layer
SEGMENTS = 2
SLOTS = 3
POLLS = 5


@dataclass(frozen=True)
class HeldTransfer:
    """A pair of nodes, and the script of both their movers."""

    script: Script
    prefill: KVTransfer
    decode: KVTransfer
    source: PagedKVCache
    source_blocks: tuple[int, ...]
    target: PagedKVCache
    blocks: tuple[int, ...]
    events: NodeEvents

    def send(self, lease: int = 0) -> "asyncio.Task[object]":
        return asyncio.create_task(self.prefill.send(job(lease, self.source_blocks, 0, TOKENS)))

    def grant(self, lease: int = 0) -> None:
        self.decode.open_lease(LeaseGrant(lease, self.blocks, 0, TOKENS))

    async def begun(self, count: int) -> None:
        """Waits until that many operations are held."""
        await eventually(lambda: len(self.script.waiting()) == count)

    async def waits(self, task: "asyncio.Task[Any]") -> None:
        """The task does not end while the held operations are polled."""
        (first, *_) = self.script.waiting()
        seen = first.polls
        await eventually(lambda: first.polls > seen + POLLS)
        assert not task.done()

    async def works(self, lease: int) -> None:
        """No slot is lost: a whole transfer of more segments than slots succeeds."""
        self.script.release_all()
        filled = len(self.events.filled)
        self.grant(lease)
        for start in range(0, TOKENS, 2):
            await self.prefill.send(job(lease, self.source_blocks, start, start + 2, first_segment=start))
        await eventually(lambda: len(self.events.filled) > filled)
        assert self.arrived()

    def arrived(self) -> bool:
        expected, got = (
            tokens_of(cache, blocks, TOKENS)
            for cache, blocks in ((self.source, self.source_blocks), (self.target, self.blocks))
        )
        return torch.equal(as_bytes(expected), as_bytes(got))

    def untouched(self) -> bool:
        return not as_bytes(self.target.view).any()


@asynccontextmanager
async def holding(*kinds: str) -> AsyncIterator[HeldTransfer]:
    source, target = make_cache(GQA, KVCacheLayout.NHD, 8), make_cache(GQA, KVCacheLayout.HND, 4)
    source_blocks, blocks = scattered_blocks(source, TOKENS, 1), scattered_blocks(target, TOKENS, 2)
    plant(source, source_blocks, TOKENS)
    script, events = Script(held=frozenset(kinds)), NodeEvents()
    async with (
        make_transfer(
            source,
            NodeEvents(),
            transport="loopback",
            incarnation=PREFILL_INCARNATION,
            segment_bytes=SEGMENT_BYTES,
            staging_slots=SLOTS,
            make_mover=late(script),
        ) as prefill,
        make_transfer(
            target,
            events,
            transport="loopback",
            segment_bytes=SEGMENT_BYTES,
            staging_slots=SLOTS,
            make_mover=late(script),
        ) as decode,
    ):
        await connect(prefill, decode)
        yield HeldTransfer(script, prefill, decode, source, source_blocks, target, blocks, events)


async def result(awaitable: Awaitable[object]) -> object:
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def test_a_segment_leaves_when_its_message_is_in_its_slot() -> None:
    async with holding("gather") as pair:
        pair.grant()
        sending = pair.send()
        await pair.begun(SEGMENTS)
        await pair.waits(sending)
        assert pair.decode.counters().peers[SENDER].segments_total == 0
        assert pair.untouched()
        pair.script.release_all()
        await result(sending)
        await eventually(lambda: len(pair.events.filled) == 1)
        assert pair.arrived()


async def test_a_lease_is_quiet_when_nothing_reads_its_blocks_and_nothing_of_it_is_sent_then() -> None:
    async with holding("gather") as pair:
        pair.grant()
        sending = pair.send()
        await pair.begun(SEGMENTS)
        quiet = asyncio.create_task(pair.prefill.quiet(PEER, 0))
        await pair.waits(quiet)
        assert not sending.done()
        pair.script.release_all()
        await result(quiet)
        with pytest.raises(Cancelled):
            await result(sending)
        assert (await pair.decode.close_lease(0)).segments == 0
        assert pair.untouched()
        await pair.works(1)


async def test_a_receiver_is_disconnected_when_nothing_gathers_for_it() -> None:
    async with holding("gather") as pair:
        pair.grant()
        sending = pair.send()
        await pair.begun(SEGMENTS)
        disconnecting = asyncio.create_task(pair.prefill.disconnect(PEER))
        await pair.waits(disconnecting)
        assert not sending.done()
        pair.script.release_all()
        assert await result(disconnecting) == ()
        with pytest.raises(DataLoss):
            await result(sending)
        assert pair.untouched()


@pytest.mark.parametrize("kind", ["gather", "scatter"])
async def test_a_mover_keeps_blocks_until_their_job_or_lease_has_ended(kind: str) -> None:
    async with holding(kind) as pair:
        pair.grant()
        sending = pair.send()
        await pair.begun(SEGMENTS)
        ending = pair.prefill.quiet(PEER, 0) if kind == "gather" else pair.decode.close_lease(0)
        ended = asyncio.create_task(ending)
        await pair.waits(ended)
        # The lease's, and while it is sent the job's.
        assert len(pair.script.placed) == 2 if kind == "gather" else 1
        pair.script.release_all()
        await result(asyncio.wait([ended, sending]))
        if kind == "gather":
            await pair.decode.close_lease(0)
        assert pair.script.placed == set()


async def test_a_lease_is_filled_when_its_last_scatter_is_done() -> None:
    async with holding("scatter") as pair:
        pair.grant()
        await result(pair.send())
        await pair.begun(SEGMENTS)
        first, last = pair.script.waiting()
        pair.script.release(last)
        await eventually(lambda: pair.decode.counters().peers[SENDER].segments_total == 1)
        assert pair.events.filled == []
        assert not pair.arrived()
        pair.script.release(first)
        await eventually(lambda: len(pair.events.filled) == 1)
        assert pair.arrived()


async def test_a_lease_is_closed_when_no_scatter_writes_to_it() -> None:
    async with holding("scatter") as pair:
        pair.grant()
        await result(pair.send())
        await pair.begun(SEGMENTS)
        closing = asyncio.create_task(pair.decode.close_lease(0))
        await pair.waits(closing)
        pair.script.release_all()
        totals = await closing
        assert (totals.number, totals.segments) == (0, SEGMENTS)
        assert pair.events.filled == []
        await pair.works(1)


async def test_a_segment_whose_lease_ends_while_it_is_read_is_late_and_not_scattered() -> None:
    async with holding("read") as pair:
        pair.grant()
        await result(pair.send())
        await pair.begun(SEGMENTS)
        assert (await pair.decode.close_lease(0)).segments == 0
        pair.script.release_all()
        await eventually(lambda: pair.decode.counters().late == SEGMENTS)
        assert pair.untouched()
        assert pair.events.refused == []
        await pair.works(1)


@pytest.mark.parametrize("kind", ["read", "scatter"])
async def test_a_sender_is_disconnected_when_nothing_of_it_is_read_or_scattered(kind: str) -> None:
    async with holding(kind) as pair:
        pair.grant()
        await result(pair.send())
        await pair.begun(SEGMENTS)
        disconnecting = asyncio.create_task(pair.decode.disconnect(SENDER))
        await pair.waits(disconnecting)
        pair.script.release_all()
        # A message that has arrived as a whole is kept, so it still fills its lease.
        assert await result(disconnecting) == (0,)
        await eventually(lambda: len(pair.events.filled) == 1)
        assert pair.arrived()


async def test_a_slot_is_not_used_again_before_its_scatter_is_done() -> None:
    async with holding("scatter") as pair:
        pair.grant()
        sending = [
            asyncio.create_task(pair.prefill.send(job(0, pair.source_blocks, start, start + 4, first_segment=start)))
            for start in range(0, TOKENS, 4)
        ]
        await pair.begun(SLOTS)
        await eventually(lambda: sum(task.done() for task in sending) == SLOTS)
        (first, *_) = pair.script.waiting()
        seen = first.polls
        await eventually(lambda: first.polls > seen + POLLS)
        assert len(pair.script.waiting()) == SLOTS
        assert sum(task.done() for task in sending) == SLOTS
        pair.script.release_all()
        await result(asyncio.gather(*sending))
        await eventually(lambda: len(pair.events.filled) == 1)
        assert pair.arrived()


async def test_a_warm_up_is_over_when_its_messages_were_read() -> None:
    async with holding("read") as pair:
        warming = asyncio.create_task(pair.prefill.warm_up(PEER, SENDER))
        await pair.begun(SLOTS)
        await pair.waits(warming)
        pair.script.release_all()
        warm = await warming
        measure = await pair.decode.warmed_up(SENDER, warm.messages, warm.bytes, timeout_s=DEADLINE_S)
        assert measure.transport == "loopback"


async def test_a_device_that_fails_fails_every_call_and_the_node_can_still_be_closed() -> None:
    def fail() -> MoveDone:
        raise RuntimeError("the device was lost")

    async with holding("gather") as pair:
        sending = pair.send()
        await pair.begun(SEGMENTS)
        for operation in pair.script.waiting():
            operation.happen = fail
        pair.script.release_all()
        with pytest.raises(Draining, match="the device was lost"):
            await result(sending)
        with pytest.raises(Draining, match="the device was lost"):
            await pair.prefill.quiet(PEER, 0)
        # Until it is restarted, so that no request is sent there.
        assert pair.prefill.stuck(after_s=3600) == "the thread has failed; its error is above"
        assert pair.decode.stuck(after_s=3600) == ""
        await result(pair.prefill.close())


async def test_a_node_that_closes_waits_for_its_running_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_CLOSE_TIMEOUT_S", DEADLINE_S)
    async with holding("gather") as pair:
        pair.grant()
        sending = pair.send()
        await pair.begun(SEGMENTS)
        closing = asyncio.create_task(pair.prefill.close())
        await eventually(lambda: pair.prefill._thread._stopping)
        await pair.waits(closing)
        pair.script.release_all()
        await result(closing)
        with pytest.raises(DataLoss):
            await result(sending)
        assert all(operation.result is not None for operation in pair.script.begun)
