"""KV between caches on a GPU: two processes on one GPU over cuda_ipc, and through the host where one end has none."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.wire.gather_scatter import gather_to_wire
from baton.node.doctor.link import measure
from kvtransfer.leases import LeaseGrant
from kvtransfer.records import LinkMeasure, WarmUp
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import TRAILER_BYTES, Segment, Tag
from kvtransfer.transfer import KVTransfer
from kvtransfer.transports.table import open_transport
from tests.conformance.kv import (
    DECODE_INCARNATION,
    PEER,
    PREFILL_INCARNATION,
    SENDER,
    NodeEvents,
    as_bytes,
    eventually,
    job,
    make_transfer,
    plant,
    scattered_blocks,
    sealed,
    tokens_of,
)
from tests.conformance.kv_child import Child, child

pytestmark = pytest.mark.gpu

GPU = "cuda"
LLAMA = KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK = KVCacheSpec(KVKind.MLA, num_layers=5, num_kv_heads=1, head_dim=576, dtype="bfloat16")
EIGHT_BITS = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=2, head_dim=64, dtype="float8_e4m3fn")
# Runs of 12 bytes, which nothing wide fits into.
NARROW = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=2, head_dim=6, dtype="bfloat16")
TOKENS = 333
SEGMENT_BYTES = 300_000
SLOTS = 3
OLD = 0xC7


def shape_of(layout: KVCacheLayout, block_size: int) -> KVCacheShape:
    return KVCacheShape(layout, block_size, num_blocks=2 * TOKENS // block_size + 2)


def planted(spec: KVCacheSpec, shape: KVCacheShape) -> tuple[PagedKVCache, tuple[int, ...]]:
    """On the CPU; the same in every process."""
    cache = PagedKVCache(spec, shape)
    blocks = scattered_blocks(cache, TOKENS, 1)
    plant(cache, blocks, TOKENS)
    return cache, blocks


def copied(cache: PagedKVCache, device: str) -> PagedKVCache:
    copy = PagedKVCache(cache.spec, cache.shape, device)
    copy.memory.copy_(cache.memory)
    return copy


def make_node(cache: PagedKVCache, events: NodeEvents, incarnation: int, transport: str = "ucx") -> KVTransfer:
    return make_transfer(
        cache,
        events,
        transport=transport,
        incarnation=incarnation,
        segment_bytes=SEGMENT_BYTES,
        staging_slots=SLOTS,
    )


def make_source(spec: KVCacheSpec, shape: KVCacheShape, device: str) -> KVTransfer:
    cache, _ = planted(spec, shape)
    source = copied(cache, device)
    if source.storage.is_cuda:
        torch.cuda.synchronize()
    return make_node(source, NodeEvents(), PREFILL_INCARNATION)


@dataclass
class Target:
    """The decode node of this process, with a warm link to a prefill process."""

    source: Child
    decode: KVTransfer
    cache: PagedKVCache
    blocks: tuple[int, ...]
    source_blocks: tuple[int, ...]
    expected: Tensor
    events: NodeEvents
    measure: LinkMeasure
    leases: "count[int]"

    async def fill(self, start: int = 0) -> None:
        lease, filled = next(self.leases), len(self.events.filled)
        self.decode.open_lease(LeaseGrant(lease, self.blocks, start, TOKENS))
        await self.source.call("send", job(lease, self.source_blocks, start, TOKENS))
        await eventually(lambda: len(self.events.filled) > filled)
        await self.decode.close_lease(lease)

    def assert_holds(self, start: int = 0) -> None:
        """The tokens from `start` on have arrived, and every other byte is unchanged."""
        wanted = PagedKVCache(self.cache.spec, self.cache.shape)
        wanted.memory.fill_(OLD)
        size = self.cache.shape.block_size
        for token in range(start, TOKENS):
            wanted.view[:, :, self.blocks[token // size], token % size] = self.expected[:, :, token]
        assert torch.equal(as_bytes(copied(self.cache, "cpu").view), as_bytes(wanted.view))


@asynccontextmanager
async def paired(
    spec: KVCacheSpec, shape_p: KVCacheShape, shape_d: KVCacheShape, *, device_p: str = GPU, device_d: str = GPU
) -> AsyncIterator[Target]:
    source, source_blocks = planted(spec, shape_p)
    cache, events = PagedKVCache(spec, shape_d, device_d), NodeEvents()
    cache.memory.fill_(OLD)
    if cache.storage.is_cuda:
        torch.cuda.synchronize()
    async with (
        make_node(cache, events, DECODE_INCARNATION) as decode,
        child(partial(make_source, spec, shape_p, device_p)) as process,
    ):
        address = await process.call("listen", PEER)
        await process.call("connect", PEER, await decode.listen(SENDER))
        await decode.connect(SENDER, address)
        warm = await process.call("warm_up", PEER, SENDER)
        assert isinstance(warm, WarmUp)
        measure = await decode.warmed_up(SENDER, warm.messages, warm.bytes, timeout_s=30)
        expected = tokens_of(source, source_blocks, TOKENS)
        blocks = scattered_blocks(cache, TOKENS, 2)
        yield Target(process, decode, cache, blocks, source_blocks, expected, events, measure, count())


CASES = {
    "NHD16_HND32": (LLAMA, (KVCacheLayout.NHD, 16), (KVCacheLayout.HND, 32)),
    "HND8_BLNHC64": (LLAMA, (KVCacheLayout.HND, 8), (KVCacheLayout.BLNHC, 64)),
    "BLHNC16_NHD16": (LLAMA, (KVCacheLayout.BLHNC, 16), (KVCacheLayout.NHD, 16)),
    "LBNC64_BLNC16": (DEEPSEEK, (KVCacheLayout.LBNC, 64), (KVCacheLayout.BLNC, 16)),
    "fp8": (EIGHT_BITS, (KVCacheLayout.NHD, 16), (KVCacheLayout.BLHNC, 32)),
    "narrow": (NARROW, (KVCacheLayout.HND, 4), (KVCacheLayout.NHD, 8)),
}


@pytest.mark.parametrize(("spec", "source", "target"), CASES.values(), ids=CASES)
async def test_every_byte_lands_where_it_belongs_and_nowhere_else(
    spec: KVCacheSpec, source: tuple[KVCacheLayout, int], target: tuple[KVCacheLayout, int]
) -> None:
    async with paired(spec, shape_of(*source), shape_of(*target)) as pair:
        assert pair.measure.transport == "cuda_ipc"
        # The lease starts in the middle of a block.
        await pair.fill(start=5)
        pair.assert_holds(start=5)
        assert pair.events.refused == []


@pytest.mark.parametrize(("device_p", "device_d"), [("cpu", GPU), (GPU, "cpu")])
async def test_either_end_may_be_on_the_cpu(device_p: str, device_d: str) -> None:
    shapes = shape_of(KVCacheLayout.NHD, 16), shape_of(KVCacheLayout.HND, 32)
    async with paired(LLAMA, *shapes, device_p=device_p, device_d=device_d) as pair:
        assert ("through host memory" in pair.measure.transport) == (device_d == GPU)
        await pair.fill()
        pair.assert_holds()


async def test_after_the_first_transfer_nothing_is_allocated() -> None:
    shape = shape_of(KVCacheLayout.NHD, 16)
    async with paired(LLAMA, shape, shape) as pair:
        await pair.fill()
        before = torch.cuda.memory_stats()
        for _ in range(10):
            await pair.fill()
        after = torch.cuda.memory_stats()
        for name in ("segment.all.allocated", "reserved_bytes.all.current", "active_bytes.all.current"):
            assert after[name] == before[name], name
        pair.assert_holds()


async def test_a_transfer_does_not_wait_for_the_default_stream() -> None:
    shape = shape_of(KVCacheLayout.NHD, 16)
    async with paired(LLAMA, shape, shape) as pair:
        await pair.fill()
        busy = torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)  # a step of the engine: two seconds of one multiprocessor
        busy.record()
        started_s = time.monotonic()
        await pair.fill()
        seconds = time.monotonic() - started_s
        assert not busy.query(), f"the transfer took {seconds:.3f} s"
        pair.assert_holds()


async def test_many_leases_at_once_do_not_mix() -> None:
    shape = shape_of(KVCacheLayout.NHD, 16)
    async with paired(LLAMA, shape, shape) as pair:
        cuts = range(0, TOKENS + 1, TOKENS // 9)
        for lease, start in enumerate(cuts[:-1]):
            pair.decode.open_lease(LeaseGrant(lease, pair.blocks, start, cuts[lease + 1]))
        for lease, start in enumerate(cuts[:-1]):
            pair.source.begin("send", job(lease, pair.source_blocks, start, cuts[lease + 1]))
        for _ in cuts[:-1]:
            assert isinstance((await pair.source.answer())[1], tuple)
        await eventually(lambda: len(pair.events.filled) == len(cuts) - 1)
        assert cuts[-1] == TOKENS
        pair.assert_holds()


@pytest.mark.parametrize(("transport", "device"), [("loopback", GPU), ("loopback", "cpu"), ("ucx", "cpu")])
@pytest.mark.parametrize("position", [None, 0, 1234, -1])
async def test_a_flipped_bit_is_refused_and_not_one_byte_written(
    transport: str, device: str, position: int | None
) -> None:
    """A bare transport plays the sender; without a flipped bit its message is taken."""
    source, source_blocks = planted(LLAMA, shape_of(KVCacheLayout.NHD, 16))
    cache, events, tokens = PagedKVCache(LLAMA, shape_of(KVCacheLayout.HND, 32), GPU), NodeEvents(), 15
    torch.cuda.synchronize()
    blocks = scattered_blocks(cache, TOKENS, 2)
    async with make_node(cache, events, DECODE_INCARNATION, transport) as decode:
        forger = open_transport(transport)
        address = forger.listen(PEER)
        forger.connect(PEER, await decode.listen(SENDER))
        await decode.connect(SENDER, address)
        decode.open_lease(LeaseGrant(0, blocks, 0, tokens))
        message = message_of(source, source_blocks, tokens)
        if position is not None:
            message[:-TRAILER_BYTES][position] ^= 0x10
        offered = message.to(device)
        if offered.is_cuda:
            torch.cuda.synchronize()
        request = forger.send(PEER, Tag(SENDER, 0, 0).pack(), offered)

        def sent() -> bool:
            forger.progress()
            return request.done

        await eventually(sent)
        await eventually(lambda: bool(events.filled or events.refused))
        if position is None:
            got = tokens_of(copied(cache, "cpu"), blocks, tokens)
            assert torch.equal(as_bytes(got), as_bytes(tokens_of(source, source_blocks, tokens)))
        else:
            assert [refused.refusal for refused in events.refused] == [SegmentRefusal.DIGEST]
            assert not cache.memory.any()
        forger.close()


def test_the_doctor_measures_the_way_that_nodes_take() -> None:
    link = measure(("cuda:0", "cuda:0"))
    assert link.carrier == "cuda_ipc"
    assert link.gigabytes_per_s > 1


def message_of(source: PagedKVCache, blocks: tuple[int, ...], tokens: int) -> Tensor:
    """All layers of the first tokens as one message, sealed."""
    spec = source.spec
    payload = torch.empty(tokens * spec.bytes_per_token, dtype=torch.uint8)
    gather_to_wire(
        source,
        block_ids=torch.tensor(blocks),
        token_start=0,
        token_stop=tokens,
        layers=range(spec.num_layers),
        heads=range(spec.num_kv_heads),
        out=payload,
    )
    segment = Segment(DECODE_INCARNATION, 0, 0, 0, spec.num_layers, 0, tokens, 0, spec.num_kv_heads, payload.numel())
    whole = sealed(segment, payload)
    return torch.cat((payload, torch.frombuffer(bytearray(whole.encode(whole.digest)), dtype=torch.uint8)))
