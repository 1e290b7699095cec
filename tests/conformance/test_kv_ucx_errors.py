"""An exception of any call of ucxx fails one pair only: real transfers, one of them with faulty bindings."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from baton.core.errors import BatonError, DataLoss, Draining
from baton.kvcache.layout import KVCacheLayout
from kvtransfer import warm_up, worker
from kvtransfer.leases import LeaseGrant
from kvtransfer.transfer import KVTransfer
from kvtransfer.transports.transport import Transport
from kvtransfer.transports.ucx import UcxTransport
from tests.conformance.faulty_ucxx import FaultyUcxx
from tests.conformance.kv import (
    DEADLINE_S,
    GQA,
    NodeEvents,
    eventually,
    job,
    make_cache,
    make_transfer,
    plant,
    scattered_blocks,
    tokens_of,
)

TOKENS = 20
# Every call of ucxx after the transport has started; a test below shows that there is no other.
CALLS = (
    "Array",
    "UCXWorker",
    "UCXXTag",
    "address",
    "alive",
    "arm",
    "check_error",
    "close_blocking",
    "completed",
    "create_from_buffer",
    "create_from_worker_address",
    "epoll_file_descriptor",
    "handle",
    "init_blocking_progress_mode",
    "progress_once",
    "tag_probe",
    "tag_recv_with_handle",
    "tag_send",
    "tobytes",
)
AT_THE_START = {"UCXContext", "UCXXTagMask"}


@dataclass
class Star:
    """One node with faulty bindings, and two others that are paired with it.

    Attributes:
        receives: the node in the middle receives; else it sends.
        broken: pairs whose link broke, as the node in the middle reported it.
        failed: why the node in the middle cannot go on.
    """

    faults: FaultyUcxx
    middle: KVTransfer
    others: tuple[KVTransfer, KVTransfer]
    receives: bool
    events: dict[KVTransfer, NodeEvents]
    broken: set[int] = field(default_factory=set)
    failed: list[BatonError] = field(default_factory=list)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def ends(self, other: int) -> tuple[KVTransfer, KVTransfer]:
        """The sender and the receiver."""
        return (self.others[other], self.middle) if self.receives else (self.middle, self.others[other])

    async def pair(self, other: int) -> int:
        """Returns the pair's number.

        Raises:
            BatonError: it could not be made; nothing is left of it.
        """
        number = next(self.numbers)
        try:
            await self.unless_broken(number, self._handshake(number, *self.ends(other)))
        except BatonError:
            await self.part(number, other)
            raise
        return number

    async def _handshake(self, number: int, sender: KVTransfer, receiver: KVTransfer) -> None:
        senders, receivers = await sender.listen(number), await receiver.listen(number)
        await receiver.connect(number, senders)
        await sender.connect(number, receivers, message_bytes=receiver.message_bytes)
        sent = await sender.warm_up(number, number)
        await receiver.warmed_up(number, sent.messages, sent.bytes, timeout_s=DEADLINE_S)

    async def part(self, number: int, other: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(end.disconnect(number) for end in self.ends(other)))

    async def fill(self, number: int, other: int) -> None:
        """Sends KV over the pair into a lease of its own, and checks the bytes.

        Raises:
            BatonError: the pair has failed.
        """
        sender, receiver = self.ends(other)
        source, target, events = sender._cache, receiver._cache, self.events[receiver]
        blocks = scattered_blocks(source, TOKENS, seed=1)
        lease, into = next(self.numbers), tuple(range(other * 8, other * 8 + 8))
        await receiver.open_lease(LeaseGrant(lease, into, 0, TOKENS))
        try:
            sent = sender.send(job(lease, blocks, 0, TOKENS, peer=number, sender_number=number))
            await self.unless_broken(number, sent)
            filled = eventually(lambda: lease in [totals.number for totals in events.filled])
            refused = eventually(lambda: lease in [each.lease for each in events.refused])
            await self.unless_broken(number, _first(filled, refused))
            if lease in [each.lease for each in events.refused]:
                raise DataLoss("a segment was refused")
        finally:
            await receiver.close_lease(lease)
        assert torch.equal(tokens_of(source, blocks, TOKENS), tokens_of(target, into, TOKENS))

    async def unless_broken(self, number: int, work: Awaitable[object]) -> None:
        """Waits for the work, or raises DataLoss if the link is reported as broken before."""
        await _first(work, eventually(lambda: number in self.broken))
        if number in self.broken:
            raise DataLoss("the link is broken")


async def _first(*works: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def star(monkeypatch: pytest.MonkeyPatch, *, receives: bool) -> AsyncIterator[Star]:
    monkeypatch.setattr(warm_up, "_BUDGET_S", 0.0)
    faults = FaultyUcxx()

    def open_faulty(name: str, *, on_gpu: bool) -> Transport:
        return UcxTransport(on_gpu=on_gpu, ucxx=faults)

    events: dict[KVTransfer, NodeEvents] = {}

    def make() -> KVTransfer:
        of_node = NodeEvents()
        cache = make_cache(GQA, KVCacheLayout.NHD, 4)
        plant(cache, scattered_blocks(cache, TOKENS, seed=1), TOKENS)
        transfer = make_transfer(cache, of_node, transport="ucx")
        events[transfer] = of_node
        return transfer

    middle, one, other = make(), make(), make()
    made = Star(faults, middle, (one, other), receives, events)
    middle.watch(lambda number, _: made.broken.add(number), made.failed.append)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "open_transport", open_faulty)
        await middle.start()
    try:
        async with one, other:
            yield made
    finally:
        await middle.close()


@pytest.mark.parametrize("receives", [True, False], ids=["receiver", "sender"])
@pytest.mark.parametrize("call", CALLS)
async def test_an_exception_of_a_call_costs_at_most_one_pair_which_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, call: str, receives: bool
) -> None:
    async with star(monkeypatch, receives=receives) as nodes:
        pairs = {1: await nodes.pair(1)}
        nodes.faults.fails_next = call
        lost = []
        # What happens to a pair, in order, until the fault has struck: its handshake, its traffic, its end.
        try:
            pairs[0] = await nodes.pair(0)
            await nodes.fill(pairs[0], 0)
            await nodes.part(pairs.pop(0), 0)
        except BatonError:
            lost.append(0)
        nodes.faults.fails_next = ""
        try:
            await nodes.fill(pairs[1], 1)
        except BatonError:
            lost.append(1)
        assert len(lost) <= 1
        for other in (0, 1):
            if number := pairs.get(other):
                await nodes.part(number, other)
            await nodes.fill(await nodes.pair(other), other)
        assert nodes.failed == []


async def test_the_list_of_calls_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    for receives in (True, False):
        async with star(monkeypatch, receives=receives) as nodes:
            number = await nodes.pair(0)
            await nodes.fill(number, 0)
            await eventually(partial(nodes.faults.called.__contains__, "arm"))
            await nodes.part(number, 0)
            called |= nodes.faults.called
    assert called - AT_THE_START == set(CALLS)


async def test_a_thread_that_cannot_go_on_says_so_first_and_fails_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls fail as those to a node that ends, so that gateways continue the requests elsewhere."""
    async with star(monkeypatch, receives=True) as nodes:
        number = await nodes.pair(0)
        thread = nodes.middle._thread
        monkeypatch.setattr(thread.receiver, "step", partial(_raise, ZeroDivisionError("a bug")))
        await eventually(lambda: bool(nodes.failed))
        assert isinstance(nodes.failed[0], Draining)
        with pytest.raises(Draining, match="a bug"):
            await nodes.middle.listen(99)
        with pytest.raises(Draining):
            await nodes.middle.close_lease(1)
        assert await nodes.middle.disconnect(number) == ()


def _raise(error: Exception) -> bool:
    raise error
