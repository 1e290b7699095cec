"""Peers that die or stall in mid-transfer over UCX: real processes, SIGKILL and SIGSTOP."""

import asyncio
import os
import signal

import pytest
import torch

from baton.core.errors import DataLoss
from kvtransfer.leases import LeaseGrant
from kvtransfer.records import SendJob
from tests.conformance.kv import DEADLINE_S, DECODE_INCARNATION, NodeEvents, connect, eventually
from tests.conformance.kv_child import ALL_BLOCKS, BIG, SEGMENT_BYTES, SHAPE, child, make_big, make_slow_receiver

CHILD_SENDER, OTHER_SENDER = 7, 8
PEER = 3
TOKENS = SHAPE.num_slots

pytestmark = pytest.mark.slow


def big_job(lease: int, sender_number: int) -> SendJob:
    return SendJob(
        peer=PEER,
        sender_number=sender_number,
        lease=lease,
        incarnation=DECODE_INCARNATION,
        first_segment=0,
        token_start=0,
        token_stop=TOKENS,
        resume_at=TOKENS,
        block_ids=ALL_BLOCKS,
    )


class Clock:
    """Time passes only when the test advances it, or with every reading."""

    def __init__(self) -> None:
        self.now_s = self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_stalls_is_cut_off_and_another_one_goes_on(fault: signal.Signals) -> None:
    """The receiver's clock is the test's: at its limit, two segments are received before the fault and few after it."""
    events = NodeEvents()
    clock = Clock()
    cache, decode = make_big(events, incarnation=DECODE_INCARNATION, receive_bytes_per_s=SEGMENT_BYTES, clock=clock)
    source, other = make_big(NodeEvents(), incarnation=0xA)
    source.view.fill_(1.25)
    async with decode, other, child() as victim:
        victim_address = await victim.call("listen", PEER)
        await victim.call("connect", PEER, await decode.listen(CHILD_SENDER))
        await decode.connect(CHILD_SENDER, victim_address)
        await connect(other, decode, number=OTHER_SENDER)
        decode.open_lease(LeaseGrant(0, ALL_BLOCKS, 0, TOKENS))
        decode.open_lease(LeaseGrant(1, ALL_BLOCKS, 0, TOKENS))
        victim.begin("send", big_job(0, CHILD_SENDER))
        await eventually(lambda: decode.counters().peers[CHILD_SENDER].segments_total == 1)
        clock.now_s += 1.5
        await eventually(lambda: decode.counters().peers[CHILD_SENDER].segments_total == 2)
        clock.now_s += 1.5  # another one is on its way when the fault comes
        os.kill(victim.pid, fault)
        clock.step_s = 1e6  # no limit any more

        # Its messages under way hold some slots; the other sender has the rest.
        await other.send(big_job(1, OTHER_SENDER))
        await eventually(lambda: [filled.number for filled in events.filled] == [1])

        async with asyncio.timeout(DEADLINE_S):
            assert await decode.disconnect(CHILD_SENDER) == (0,)
        totals = await decode.close_lease(0)
        assert 2 <= totals.segments < BIG.num_layers * 8
        cache.view.fill_(0.0)

        if fault is signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGCONT)
            victim.begin("disconnect", PEER)
            answers = dict([await victim.answer(), await victim.answer()])
            assert answers["disconnect"] == ()
            assert isinstance(answers["send"], DataLoss)
            assert not cache.view.any()
        decode.open_lease(LeaseGrant(2, ALL_BLOCKS, 0, TOKENS))
        await other.send(big_job(2, OTHER_SENDER))
        await eventually(lambda: len(events.filled) == 2)
        assert torch.equal(cache.view, source.view)
        assert events.refused == []


async def test_a_receiver_that_dies_fails_the_send_once_its_link_is_closed() -> None:
    source, prefill = make_big(NodeEvents(), incarnation=0xA)
    source.view.fill_(1.25)
    async with prefill, child(make_slow_receiver) as victim:
        victim_address = await victim.call("listen", CHILD_SENDER)
        await victim.call("connect", CHILD_SENDER, await prefill.listen(PEER))
        await prefill.connect(PEER, victim_address)
        await victim.call("open_lease", LeaseGrant(0, ALL_BLOCKS, 0, TOKENS))
        sending = asyncio.create_task(prefill.send(big_job(0, CHILD_SENDER)))
        await eventually(lambda: prefill.counters().peers[PEER].segments_total >= 2)
        os.kill(victim.pid, signal.SIGKILL)
        await prefill.disconnect(PEER)
        with pytest.raises(DataLoss):
            await sending
        await prefill.quiet(PEER, 0)
