"""The GPU's mover equals the CPU's, byte for byte, and neither waits nor allocates."""

import time

import pytest
import torch

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.cuda import CudaMover
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.movers.mover import Pending, SavedPayload
from kvtransfer.parts import PartPlace
from kvtransfer.segments import TRAILER_BYTES, Segment, payload_bytes
from kvtransfer.staging import Slot
from tests.conformance.kv import DEADLINE_S
from tests.gpu.waiting import held, no_waiting

pytestmark = pytest.mark.gpu

LLAMA = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=8, head_dim=128, dtype="bfloat16")
DEEPSEEK = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=576, dtype="bfloat16")
# Payloads that end at odd places, and with them trailers that begin there.
NARROW = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=2, head_dim=6, dtype="bfloat16")
EIGHT_BITS = KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=1, head_dim=3, dtype="float8_e4m3fn")
SHAPE = KVCacheShape(KVCacheLayout.NHD, 16, 64)
BLOCKS, OTHERS = (40, 3, 17, 63, 0, 21), (1, 2, 50, 49, 48, 9)
TOKENS = range(5, 83)
OLD = 0xC7


def wait_for(operation: Pending) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not operation.done:
        assert time.monotonic() < end_s


def layout_of(spec: KVCacheSpec) -> KVCacheShape:
    return SHAPE if spec.kind is KVKind.GQA else KVCacheShape(KVCacheLayout.LBNC, 16, 64)


def movers(spec: KVCacheSpec) -> tuple[CpuMover, CudaMover]:
    """Movers for two caches with equal contents."""
    cache = PagedKVCache(spec, layout_of(spec))
    cache.memory.random_(generator=torch.Generator().manual_seed(3))
    copy = PagedKVCache(spec, layout_of(spec), "cuda")
    copy.memory.copy_(cache.memory)
    return CpuMover(cache, lambda: None), CudaMover(copy)


def segment_of(spec: KVCacheSpec) -> Segment:
    size = payload_bytes(spec, layers=2, tokens=len(TOKENS), heads=spec.num_kv_heads)
    return Segment(11, 12, 13, 0, 3, TOKENS.start, TOKENS.stop, 0, spec.num_kv_heads, size, layer_step=2)


def place_of(segment: Segment) -> PartPlace:
    """Where a segment lies in a cache that has all heads."""
    return PartPlace(0, segment.layers, segment.token_start, segment.token_stop, segment.heads)


def slot_of(mover: CpuMover | CudaMover, num_bytes: int, *, through_host: bool = False) -> Slot:
    (slot,) = mover.open_pool(slot_bytes=num_bytes, slots=1, through_host=through_host).members
    return slot


@pytest.mark.parametrize("with_digest", [True, False])
@pytest.mark.parametrize("through_host", [False, True])
@pytest.mark.parametrize("spec", [LLAMA, DEEPSEEK, NARROW, EIGHT_BITS])
def test_messages_are_those_of_the_cpu_and_are_taken_like_them(
    spec: KVCacheSpec, through_host: bool, with_digest: bool
) -> None:
    cpu, gpu = movers(spec)
    segment = segment_of(spec)
    num_bytes = segment.payload_bytes + TRAILER_BYTES
    expected, slot = slot_of(cpu, num_bytes), slot_of(gpu, num_bytes, through_host=through_host)
    for mover, into in ((cpu, expected), (gpu, slot)):
        blocks = mover.place(BLOCKS, incoming=False)
        wait_for(mover.gather(into, blocks, segment, place_of(segment), with_digest=with_digest))
        blocks.free()
    assert torch.equal(slot.memory.cpu(), expected.memory)
    readings = [
        mover.read(into, num_bytes, with_digest=True, with_extremes=True)
        for mover, into in ((cpu, expected), (gpu, slot))
    ]
    wait_for(readings[1])
    assert len({(reading.trailer, reading.digest, reading.extremes) for reading in readings}) == 1
    for mover, into in ((cpu, expected), (gpu, slot)):
        mover._cache.memory.fill_(OLD)
        torch.cuda.synchronize()
        blocks = mover.place(OTHERS, incoming=True)
        wait_for(mover.scatter(into, blocks, segment, place_of(segment)))
        blocks.free()
    assert torch.equal(gpu._cache.memory.cpu(), cpu._cache.memory)
    gpu.close()


@pytest.mark.parametrize("value", [200, None])
def test_messages_that_warm_a_link_up_are_those_of_the_cpu(value: int | None) -> None:
    cpu, gpu = movers(LLAMA)
    segment = segment_of(LLAMA)
    num_bytes = segment.payload_bytes + TRAILER_BYTES
    expected, slot = slot_of(cpu, num_bytes), slot_of(gpu, num_bytes)
    slot.memory.zero_()
    torch.cuda.synchronize()
    for mover, into in ((cpu, expected), (gpu, slot)):
        wait_for(mover.fill(into, segment, value, with_digest=True))
    assert torch.equal(slot.memory.cpu(), expected.memory)
    gpu.close()


def test_many_requests_keep_their_block_ids_while_the_other_stream_works() -> None:
    _, mover = movers(LLAMA)
    torch.cuda._sleep(1_000_000_000)  # on the incoming stream, this thread's
    tables = [mover.place(range(first, first + 6), incoming=False) for first in range(20)]
    torch.cuda.synchronize()
    ids = [table.paged.block_ids[:6].tolist() for table in tables]
    assert ids == [list(range(first, first + 6)) for first in range(20)]


@pytest.mark.parametrize("through_host", [False, True])
def test_a_segment_neither_waits_nor_allocates(through_host: bool) -> None:
    _, gpu = movers(LLAMA)
    segment = segment_of(LLAMA)
    num_bytes = segment.payload_bytes + TRAILER_BYTES
    slot = slot_of(gpu, num_bytes, through_host=through_host)

    def all_of_it() -> None:
        sent, received = gpu.place(BLOCKS, incoming=False), gpu.place(OTHERS, incoming=True)
        wait_for(gpu.gather(slot, sent, segment, place_of(segment), with_digest=True))
        wait_for(gpu.read(slot, num_bytes, with_digest=True, with_extremes=False))
        wait_for(gpu.scatter(slot, received, segment, place_of(segment)))
        sent.free()
        received.free()

    all_of_it()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    with no_waiting():
        for _ in range(20):
            all_of_it()
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "reserved_bytes.all.current"):
        assert after[name] == before[name], name
    gpu.close()


@pytest.mark.parametrize("spec", [LLAMA, DEEPSEEK, NARROW, EIGHT_BITS])
def test_a_message_in_host_memory_is_that_of_the_cpu_and_comes_back(spec: KVCacheSpec) -> None:
    cpu, gpu = movers(spec)
    segment = segment_of(spec)
    num_bytes = segment.payload_bytes + TRAILER_BYTES
    pages = {mover: mover.open_host_memory(2 * num_bytes) for mover in (cpu, gpu)}
    assert pages[gpu].tensor.is_pinned()
    for mover in (cpu, gpu):
        slots = [slot_of(mover, num_bytes) for _ in range(2)]
        kept = pages[mover].tensor[num_bytes:]
        sent, received = mover.place(BLOCKS, incoming=False), mover.place(OTHERS, incoming=True)
        payload = kept[: segment.payload_bytes]
        saved = SavedPayload(sent, place_of(segment), payload.numpy().data, payload.data_ptr())
        saving = mover.save(slots[0], [saved, saved])
        wait_for(saving)
        first, second = saving.digests
        assert first == second
        trailer = segment.encode(segment.digest_over(second))
        kept[segment.payload_bytes :] = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
        mover._cache.memory.fill_(OLD)
        torch.cuda.synchronize()
        # The host waits for the second operation of a slot only.
        mover.copy_in(slots[1], num_bytes, kept)
        reading = mover.read(slots[1], num_bytes, with_digest=True, with_extremes=False)
        wait_for(reading)
        assert reading.trailer == segment.encode(segment.digest_over(reading.digest))
        wait_for(mover.scatter(slots[1], received, segment, place_of(segment)))
    assert torch.equal(pages[gpu].tensor, pages[cpu].tensor)
    assert torch.equal(gpu._cache.memory.cpu(), cpu._cache.memory)
    gpu.close()
    for each in pages.values():
        each.close()
    assert not pages[gpu].tensor.is_pinned()


def test_copies_to_and_from_host_memory_neither_wait_nor_allocate() -> None:
    _, gpu = movers(LLAMA)
    segment = segment_of(LLAMA)
    num_bytes = segment.payload_bytes + TRAILER_BYTES
    slot, pages = slot_of(gpu, num_bytes), HostPages(num_bytes, pinned=True)

    def all_of_it() -> None:
        blocks = gpu.place(BLOCKS, incoming=False)
        payload = pages.tensor[: segment.payload_bytes]
        saved = SavedPayload(blocks, place_of(segment), payload.numpy().data, payload.data_ptr())
        wait_for(gpu.save(slot, [saved] * 3))
        gpu.copy_in(slot, num_bytes, pages.tensor)
        wait_for(gpu.read(slot, num_bytes, with_digest=True, with_extremes=False))
        blocks.free()

    all_of_it()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    with no_waiting():
        for _ in range(20):
            all_of_it()
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "reserved_bytes.all.current"):
        assert after[name] == before[name], name
    gpu.close()
    pages.close()


def message_in_host_memory(gpu: CudaMover, segment: Segment) -> HostPages:
    """The message of the first blocks, in page-locked memory."""
    num_bytes = segment.payload_bytes + TRAILER_BYTES
    slot, pages, blocks = slot_of(gpu, num_bytes), HostPages(num_bytes, pinned=True), gpu.place(BLOCKS, incoming=False)
    wait_for(gpu.gather(slot, blocks, segment, place_of(segment), with_digest=True))
    pages.tensor.copy_(slot.memory)
    blocks.free()
    return pages


def test_a_message_is_copied_and_checked_while_another_one_is_scattered() -> None:
    _, gpu = movers(LLAMA)
    segment = segment_of(LLAMA)
    pages = message_in_host_memory(gpu, segment)
    num_bytes = pages.tensor.numel()
    slot = slot_of(gpu, num_bytes)
    with held(gpu._incoming):
        gpu.copy_in(slot, num_bytes, pages.tensor)
        reading = gpu.read(slot, num_bytes, with_digest=True, with_extremes=False)
        wait_for(reading)
        assert reading.trailer == segment.encode(segment.digest_over(reading.digest))
    gpu.close()
    pages.close()


def test_a_message_is_scattered_while_later_ones_are_copied() -> None:
    cpu, gpu = movers(LLAMA)
    segment = segment_of(LLAMA)
    pages = message_in_host_memory(gpu, segment)
    num_bytes = pages.tensor.numel()
    first, second = slot_of(gpu, num_bytes), slot_of(gpu, num_bytes)
    blocks = gpu.place(OTHERS, incoming=True)
    gpu.copy_in(first, num_bytes, pages.tensor)
    wait_for(gpu.read(first, num_bytes, with_digest=True, with_extremes=False))
    with held(gpu._copies):
        gpu.copy_in(second, num_bytes, pages.tensor)
        later = gpu.read(second, num_bytes, with_digest=True, with_extremes=False)
        wait_for(gpu.scatter(first, blocks, segment, place_of(segment)))
        assert not later.done
    wait_for(later)
    expected = slot_of(cpu, num_bytes)
    expected.memory.copy_(pages.tensor)
    cpu.scatter(expected, cpu.place(OTHERS, incoming=True), segment, place_of(segment))
    assert torch.equal(gpu._cache.memory.cpu(), cpu._cache.memory)
    gpu.close()
    pages.close()


def test_a_message_is_checked_after_its_copy_not_before() -> None:
    _, gpu = movers(LLAMA)
    segment = segment_of(LLAMA)
    pages = message_in_host_memory(gpu, segment)
    num_bytes = pages.tensor.numel()
    slot = slot_of(gpu, num_bytes)
    slot.memory.fill_(OLD)
    torch.cuda.synchronize()
    with held(gpu._copies):
        gpu.copy_in(slot, num_bytes, pages.tensor)
        reading = gpu.read(slot, num_bytes, with_digest=True, with_extremes=False)
        time.sleep(0.05)  # a check that does not wait for the copy is over by then
        assert not reading.done
    wait_for(reading)
    assert reading.trailer == segment.encode(segment.digest_over(reading.digest))
    gpu.close()
    pages.close()


def test_more_requests_than_there_was_room_for_have_their_own_blocks() -> None:
    _, gpu = movers(LLAMA)
    requests = [tuple(range(start, start + 4)) for start in range(0, 60, 3)]
    placed = [gpu.place(blocks, incoming=True) for blocks in requests]
    torch.cuda.synchronize()
    assert [tuple(table.paged.block_ids[:4].tolist()) for table in placed] == requests
    gpu.close()


def test_blocks_and_tokens_that_do_not_exist_are_errors() -> None:
    _, gpu = movers(LLAMA)
    segment = segment_of(LLAMA)
    slot = slot_of(gpu, segment.payload_bytes + TRAILER_BYTES)
    for block in (-1, SHAPE.num_blocks):
        with pytest.raises(InternalError, match="block ids"):
            gpu.place((0, block), incoming=False)
    with pytest.raises(InternalError, match="tokens"):
        gpu.gather(slot, gpu.place(BLOCKS[:-1], incoming=False), segment, place_of(segment), with_digest=True)
    gpu.close()
