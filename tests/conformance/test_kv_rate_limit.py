"""A receiver with a rate limit applies it to all its senders together; the rest waits at the senders. Tests set the
time; `tests/unit/kvtransfer/test_receiver_limit.py` checks the senders' shares."""

import asyncio
from functools import partial

import pytest

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.leases import LeaseGrant
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import (
    DEADLINE_S,
    DECODE_INCARNATION,
    PEER,
    PREFILL_INCARNATION,
    SENDER,
    NodeEvents,
    connect,
    eventually,
    job,
    make_transfer,
)

# 32 KiB a token, 8 MiB a lease, 32 segments of 256 KiB.
SPEC = KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=8, head_dim=128, dtype="float32")
TOKENS = 256
SHAPE = KVCacheShape(KVCacheLayout.NHD, block_size=16, num_blocks=2 * TOKENS // 16)
LEASES = 2
BLOCKS = [tuple(range(16 * lease, 16 * (lease + 1))) for lease in range(LEASES)]
SEGMENT_BYTES = 256 << 10
SEGMENTS = LEASES * TOKENS * SPEC.bytes_per_token // SEGMENT_BYTES
LIMIT = 1e6
# After one segment, the next one may be taken a little earlier than this, and the one after it later.
STEP_S = 1.01 * SEGMENT_BYTES / LIMIT
MEASURING = SENDER + LEASES


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(cache: PagedKVCache, events: NodeEvents, transport: str, incarnation: int) -> KVTransfer:
    return make_transfer(cache, events, transport=transport, incarnation=incarnation, segment_bytes=SEGMENT_BYTES)


@pytest.mark.parametrize("transport", ["loopback", "ucx"])
async def test_the_limit_holds_for_all_senders_together_but_not_for_link_measurements(transport: str) -> None:
    events, clock = NodeEvents(), Clock()
    cache, source = PagedKVCache(SPEC, SHAPE), PagedKVCache(SPEC, SHAPE)
    source.view.normal_()
    async with (
        make(source, NodeEvents(), transport, PREFILL_INCARNATION) as one,
        make(source, NodeEvents(), transport, PREFILL_INCARNATION + 1) as other,
        make(source, NodeEvents(), transport, PREFILL_INCARNATION + 2) as measuring,
        make_transfer(
            cache,
            events,
            transport=transport,
            incarnation=DECODE_INCARNATION,
            segment_bytes=SEGMENT_BYTES,
            receive_bytes_per_s=LIMIT,
            clock=clock,
        ) as receiver,
    ):
        for index, sender in enumerate((one, other, measuring)):
            await connect(sender, receiver, number=SENDER + index)

        def received() -> int:
            peers = receiver.counters().peers
            return sum(peers[SENDER + index].segments_total for index in range(LEASES))

        def has_received(segments: int) -> bool:
            return received() == segments

        sending = []
        for index, sender in enumerate((one, other)):
            receiver.open_lease(LeaseGrant(index, BLOCKS[index], 0, TOKENS))
            part = job(index, BLOCKS[index], 0, TOKENS, sender_number=SENDER + index)
            sending.append(asyncio.create_task(sender.send(part)))
        await eventually(partial(has_received, 1))

        warm = await measuring.warm_up(PEER, MEASURING)
        await receiver.warmed_up(MEASURING, warm.messages, warm.bytes, timeout_s=DEADLINE_S)

        for taken in range(2, SEGMENTS + 1):
            assert received() == taken - 1
            clock.now_s += STEP_S
            await eventually(partial(has_received, taken))
        await asyncio.gather(*sending)
        await eventually(lambda: len(events.filled) == LEASES)
        for lease in range(LEASES):
            await receiver.close_lease(lease)
    assert cache.view.equal(source.view)
