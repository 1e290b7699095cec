"""KV from one cache to another: every layout and block size, compared byte by byte, and the calls around it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise, product

import pytest
import torch

from baton.core.errors import ConfigError, DataLoss, DeadlineExceeded, InternalError, PeerRefused, UnknownLease
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KVCacheSpec
from kvtransfer import worker
from kvtransfer.leases import LeaseGrant
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.table import open_mover
from kvtransfer.segments import TRAILER_BYTES
from kvtransfer.staging import StagingPool
from kvtransfer.transports.table import TRANSPORTS
from tests.conformance.kv import (
    DEADLINE_S,
    GQA,
    LATE,
    MLA,
    PEER,
    SENDER,
    TRANSPORT_NAMES,
    NodeEvents,
    Pair,
    as_bytes,
    connect,
    eventually,
    job,
    linked,
    make_cache,
    make_transfer,
    plant,
    scattered_blocks,
    tokens_of,
)

NUM_TOKENS = 37
BLOCK_SIZES = ((4, 8), (8, 8), (8, 4))
LAYOUTS = [(GQA, *pair) for pair in product(GQA_LAYOUTS, repeat=2)] + [
    (MLA, *pair) for pair in product(MLA_LAYOUTS, repeat=2)
]
CASES = [(*layouts, *sizes) for layouts, sizes in product(LAYOUTS, BLOCK_SIZES)]
NHD = KVCacheLayout.NHD


def case_name(value: object) -> str:
    if isinstance(value, KVCacheLayout):
        return value.name
    return str(value.kind) if isinstance(value, KVCacheSpec) else str(value)


@pytest.fixture(params=TRANSPORT_NAMES)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def planted_pair(num_tokens: int = NUM_TOKENS) -> tuple[PagedKVCache, tuple[int, ...], PagedKVCache, tuple[int, ...]]:
    prefill, decode = make_cache(GQA, NHD, 8), make_cache(GQA, KVCacheLayout.HND, 4)
    blocks_p, blocks_d = scattered_blocks(prefill, num_tokens, 1), scattered_blocks(decode, num_tokens, 2)
    plant(prefill, blocks_p, num_tokens)
    return prefill, blocks_p, decode, blocks_d


async def fill(pair: Pair, blocks_p: tuple[int, ...], blocks_d: tuple[int, ...], *cuts: int) -> None:
    """One lease over [cuts[0], cuts[-1]), sent in the chunks between the cuts; returns when it is filled."""
    number = len(pair.events.filled)
    pair.decode.open_lease(LeaseGrant(number, blocks_d, cuts[0], cuts[-1]))
    sent = 0
    for start, stop in pairwise(cuts):
        sent += len(await pair.prefill.send(job(number, blocks_p, start, stop, first_segment=sent)))
    await eventually(lambda: len(pair.events.filled) > number)
    filled = pair.events.filled[number]
    assert (filled.number, filled.segments) == (number, sent)


def assert_holds(
    cache: PagedKVCache, before: PagedKVCache, expected: torch.Tensor, cells: list[tuple[int, int]]
) -> None:
    """Token slots `cells` (block, offset) hold `expected` [L, K, T, H, C]; every other byte is as it was before."""
    wanted = before.view.clone()
    for token, (block, offset) in enumerate(cells):
        wanted[:, :, block, offset] = expected[:, :, token]
    assert torch.equal(as_bytes(cache.view), as_bytes(wanted))


@pytest.mark.parametrize(("spec", "layout_p", "layout_d", "block_p", "block_d"), CASES, ids=case_name)
async def test_every_byte_lands_where_it_belongs_and_nowhere_else(
    transport: str, spec: KVCacheSpec, layout_p: KVCacheLayout, layout_d: KVCacheLayout, block_p: int, block_d: int
) -> None:
    prefill, decode, before = (
        make_cache(spec, layout_p, block_p),
        make_cache(spec, layout_d, block_d),
        make_cache(spec, layout_d, block_d),
    )
    for cache in (decode, before):
        cache.view.fill_(-7.0)
    blocks_p, blocks_d = scattered_blocks(prefill, NUM_TOKENS, 1), scattered_blocks(decode, NUM_TOKENS, 2)
    plant(prefill, blocks_p, NUM_TOKENS)
    async with linked(prefill, decode, transport=transport) as pair:
        # D had the first tokens: the lease starts in the middle of a block of both.
        await fill(pair, blocks_p, blocks_d, 5, 22, 23, NUM_TOKENS)
    expected = tokens_of(prefill, blocks_p, NUM_TOKENS)[:, :, 5:]
    cells = [(blocks_d[token // block_d], token % block_d) for token in range(5, NUM_TOKENS)]
    assert_holds(decode, before, expected, cells)


@pytest.mark.parametrize("segment_bytes", [GQA.bytes_per_token_layer, 333, 4096, 1 << 20])
async def test_any_segment_size_that_holds_a_token_will_do(transport: str, segment_bytes: int) -> None:
    prefill, blocks_p, decode, blocks_d = planted_pair()
    async with linked(prefill, decode, transport=transport, segment_bytes=segment_bytes) as pair:
        await fill(pair, blocks_p, blocks_d, 0, NUM_TOKENS)
    assert torch.equal(tokens_of(prefill, blocks_p, NUM_TOKENS), tokens_of(decode, blocks_d, NUM_TOKENS))


async def test_the_smaller_of_two_segment_sizes_counts(transport: str) -> None:
    prefill, blocks_p, decode, blocks_d = planted_pair()
    events = NodeEvents()
    async with (
        make_transfer(prefill, NodeEvents(), transport=transport, segment_bytes=5000) as sender,
        make_transfer(decode, events, transport=transport, segment_bytes=300) as receiver,
    ):
        await connect(sender, receiver)
        warm = await sender.warm_up(PEER, SENDER)
        assert warm.bytes <= 300 * warm.messages
        await receiver.warmed_up(SENDER, warm.messages, warm.bytes, timeout_s=DEADLINE_S)
        await fill(Pair(sender, receiver, events), blocks_p, blocks_d, 0, NUM_TOKENS)


async def test_several_leases_at_once_do_not_mix(transport: str) -> None:
    prefill, decode = make_cache(GQA, NHD, 8), make_cache(GQA, NHD, 8)
    order = tuple(range(decode.shape.num_blocks))
    plant(prefill, order, prefill.shape.num_slots)
    requests = [order[start : start + 4] for start in range(0, 16, 4)]
    async with linked(prefill, decode, transport=transport) as pair:
        for number, blocks in enumerate(requests):
            pair.decode.open_lease(LeaseGrant(number, blocks[::-1], 0, 30))
        await asyncio.gather(*(pair.prefill.send(job(number, blocks, 0, 30)) for number, blocks in enumerate(requests)))
        await eventually(lambda: len(pair.events.filled) == len(requests))
        for number in range(len(requests)):
            totals = await pair.decode.close_lease(number)
            assert totals.bytes == 30 * GQA.bytes_per_token
    for blocks in requests:
        assert torch.equal(tokens_of(prefill, blocks, 30), tokens_of(decode, blocks[::-1], 30))


async def test_a_lease_without_tokens_is_filled_at_once(transport: str) -> None:
    prefill, _, decode, blocks_d = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        pair.decode.open_lease(LeaseGrant(0, blocks_d, 16, 16))
        await eventually(lambda: len(pair.events.filled) == 1)
        assert (await pair.decode.close_lease(0)).segments == 0


async def test_warm_up_goes_through_every_slot_and_measures_the_link(transport: str) -> None:
    prefill, _, decode, _ = planted_pair()
    async with linked(prefill, decode, transport=transport, segment_bytes=100_000) as pair:
        warm = await pair.prefill.warm_up(PEER, SENDER)
        # One through each of three slots, then at least two small ones and two large ones for each.
        assert warm.messages >= 3 * (1 + 2 + 2)
        assert warm.bytes >= 3 * (100_000 + 2 * 50_000 + 2 * 100_000)
        measure = await pair.decode.warmed_up(SENDER, warm.messages, warm.bytes, timeout_s=DEADLINE_S)
        assert measure.gigabytes_per_s > 0
        assert measure.latency_s > 0
        assert measure.message_cost_s >= 0
        await pair.prefill.use_link(PEER, measure.speed)
        assert measure.transport in TRANSPORTS[transport.removesuffix(LATE)].carriers
        assert pair.decode.counters().refused == 0


class AsOnGpu(CpuMover):
    """Claims that its cache is on a GPU, and records where staging is requested."""

    on_gpu = True

    def __init__(self, cache: PagedKVCache, between: Callable[[], object], asked: list[bool]) -> None:
        super().__init__(cache, between)
        self.asked = asked

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        self.asked.append(through_host)
        return super().open_pool(slot_bytes=slot_bytes, slots=slots, through_host=False)


@pytest.mark.parametrize("other_on_gpu", [True, False])
async def test_a_link_that_does_not_reach_a_gpus_memory_goes_through_the_host_and_reports_it(
    transport: str, *, other_on_gpu: bool
) -> None:
    prefill, blocks_p, decode, blocks_d = planted_pair()
    asked: list[bool] = []
    events = NodeEvents()

    def make(cache: PagedKVCache, between: Callable[[], object]) -> CpuMover:
        return AsOnGpu(cache, between, asked)

    name = transport.removesuffix(LATE)
    async with (
        make_transfer(prefill, NodeEvents(), transport=name, make_mover=make if other_on_gpu else open_mover) as sender,
        make_transfer(decode, events, transport=name, make_mover=make) as receiver,
    ):
        await connect(sender, receiver)
        warm = await sender.warm_up(PEER, SENDER)
        measure = await receiver.warmed_up(SENDER, warm.messages, warm.bytes, timeout_s=DEADLINE_S)
        await fill(Pair(sender, receiver, events), blocks_p, blocks_d, 0, NUM_TOKENS)
    # There is no memory of a GPU here that a transport could reach; within a process every memory is reached.
    through_host = name != "loopback"
    assert asked == [through_host] * (2 if other_on_gpu else 1)
    assert measure.transport.endswith(" through host memory") == through_host


async def test_a_warm_up_that_does_not_arrive_has_a_deadline(transport: str) -> None:
    prefill, _, decode, _ = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        with pytest.raises(DeadlineExceeded, match="warm-up"):
            await pair.decode.warmed_up(SENDER, 2, 100, timeout_s=0.01)


async def test_a_peer_that_sends_no_digests_is_refused_at_warm_up(transport: str) -> None:
    prefill, _, decode, _ = planted_pair()
    async with (
        make_transfer(prefill, NodeEvents(), transport=transport, digests=False) as sender,
        make_transfer(decode, NodeEvents(), transport=transport) as receiver,
    ):
        await connect(sender, receiver)
        warm = await sender.warm_up(PEER, SENDER)
        with pytest.raises(PeerRefused, match="digests"):
            await receiver.warmed_up(SENDER, warm.messages, warm.bytes, timeout_s=DEADLINE_S)


async def test_counters_count_moved_bytes_and_forget_lost_peers(transport: str) -> None:
    prefill, blocks_p, decode, blocks_d = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        await fill(pair, blocks_p, blocks_d, 0, 20)
        for transfer, peer in ((pair.prefill, PEER), (pair.decode, SENDER)):
            traffic = transfer.counters().peers[peer]
            assert traffic.bytes_total == 20 * GQA.bytes_per_token
            assert traffic.segments_total == pair.events.filled[0].segments
            await transfer.disconnect(peer)
            assert transfer.counters().peers == {}


async def test_quiet_ends_a_send_that_is_not_received(transport: str) -> None:
    prefill, blocks_p, decode, _ = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        await pair.prefill.quiet(PEER, 5)
        # Without a lease D discards, so the send ends well or is ended: either way nothing of it is left.
        sending = asyncio.create_task(pair.prefill.send(job(5, blocks_p, 0, NUM_TOKENS)))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        await pair.prefill.quiet(PEER, 5)


async def test_a_disconnected_peer_cannot_be_sent_to(transport: str) -> None:
    prefill, blocks_p, decode, _ = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        assert await pair.prefill.disconnect(PEER) == ()
        with pytest.raises(DataLoss):
            await pair.prefill.send(job(0, blocks_p, 0, 4))
        with pytest.raises(DataLoss):
            await pair.prefill.warm_up(PEER, SENDER)


async def test_a_lost_sender_leaves_its_leases_to_the_caller(transport: str) -> None:
    prefill, blocks_p, decode, blocks_d = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        for number in range(3):
            pair.decode.open_lease(LeaseGrant(number, blocks_d, 0, 20))
        await pair.prefill.send(job(1, blocks_p, 0, 8))
        await eventually(lambda: pair.decode.counters().peers[SENDER].segments_total > 0)
        assert await pair.decode.disconnect(SENDER) == (1,)
        totals = await pair.decode.close_lease(1)
        assert totals.bytes <= 8 * GQA.bytes_per_token


async def test_impossible_leases_are_errors(transport: str) -> None:
    prefill, _, decode, blocks_d = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        pair.decode.open_lease(LeaseGrant(3, blocks_d, 0, 4))
        for wrong in (
            LeaseGrant(3, blocks_d, 0, 4),
            LeaseGrant(4, (0,), 0, decode.shape.block_size + 1),
            LeaseGrant(4, (decode.shape.num_blocks,), 0, 1),
        ):
            with pytest.raises(InternalError):
                pair.decode.open_lease(wrong)
        with pytest.raises(UnknownLease):
            await pair.decode.close_lease(9)


async def test_a_job_with_wrong_blocks_fails_alone(transport: str) -> None:
    prefill, blocks_p, decode, blocks_d = planted_pair()
    async with linked(prefill, decode, transport=transport) as pair:
        with pytest.raises(InternalError):
            await pair.prefill.send(job(0, (prefill.shape.num_blocks,), 0, 4))
        await fill(pair, blocks_p, blocks_d, 0, NUM_TOKENS)


async def test_closing_ends_waiting_operations_and_leaves_no_thread(transport: str) -> None:
    prefill, _, decode, blocks_d = planted_pair()
    others = set(threading.enumerate())  # of other tests
    async with make_transfer(decode, NodeEvents(), transport=transport) as receiver:
        async with make_transfer(prefill, NodeEvents(), transport=transport) as sender:
            await connect(sender, receiver)
            receiver.open_lease(LeaseGrant(0, blocks_d, 0, NUM_TOKENS))
            waiting = asyncio.create_task(receiver.warmed_up(SENDER, 1, 1, timeout_s=60))
            await asyncio.sleep(0)
        await receiver.close()
        with pytest.raises(DataLoss):
            await waiting
        with pytest.raises(InternalError, match="closed"):
            await receiver.disconnect(SENDER)
    assert "kvtransfer" not in {thread.name for thread in set(threading.enumerate()) - others}


async def test_a_configuration_that_cannot_work_is_an_error_at_once(transport: str) -> None:
    cache = make_cache(GQA, NHD, 8)
    with pytest.raises(ConfigError, match="segment_bytes"):
        make_transfer(cache, NodeEvents(), transport=transport, segment_bytes=GQA.bytes_per_token_layer - 1)
    with pytest.raises(ConfigError, match="staging_slots"):
        make_transfer(cache, NodeEvents(), transport=transport, staging_slots=0)
    with pytest.raises(ConfigError, match="pigeon"):
        await make_transfer(cache, NodeEvents(), transport="pigeon").start()
    async with make_transfer(cache, NodeEvents(), transport=transport) as transfer:
        address = await transfer.listen(1)
        with pytest.raises(ConfigError, match="segment_bytes"):
            await transfer.connect(1, address, message_bytes=TRAILER_BYTES + 5)
        with pytest.raises(PeerRefused, match="address"):
            await transfer.connect(1, b"nowhere")


async def test_links_take_turns_with_slow_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening many links at once must not hold up what is being sent."""
    monkeypatch.setattr(worker, "_CALLS_S", 0.0)
    async with make_transfer(make_cache(GQA, NHD, 8), NodeEvents(), transport="loopback") as transfer:
        turns, begin = 0, threading.Event()
        seen: list[int] = []
        transport = transfer._thread.transport
        progress = transport.progress

        def count() -> bool:
            nonlocal turns
            turns += 1
            return progress()

        def call(future: "Future[None]") -> None:
            begin.wait()
            seen.append(turns)
            future.set_result(None)

        monkeypatch.setattr(transport, "progress", count)
        calls = [asyncio.wrap_future(transfer._thread.call(call)) for _ in range(4)]
        begin.set()
        await asyncio.gather(*calls)
        assert all(earlier < later for earlier, later in pairwise(seen))
