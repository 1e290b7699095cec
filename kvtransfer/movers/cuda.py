"""The mover for a cache on a GPU: kernels and copies on its own streams, whose completion is polled with events.

The host never waits here, not even for a digest's eight bytes: a sender's kernel writes them into the trailer, a
receiver's into pinned memory. The host orders engine and mover: the engine reports a chunk after its step, opens a
lease after its own last use of the blocks, and gets a filled lease after the last scatter and a sent chunk after UCX.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVKind
from baton.kvcache.wire.conversion import Converter, gather_converted
from baton.kvcache.wire.prepared import DeviceWire
from kvtransfer.movers.cuda_tables import BlockTable, BlockTables, PlacedTables, open_copy
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.movers.mover import SAVED_AT_ONCE, Blocks, SavedPayload, check_blocks
from kvtransfer.parts import PartPlace
from kvtransfer.segments import DIGEST_BYTES, DIGEST_OFFSET, TRAILER_BYTES, Segment
from kvtransfer.staging import Slot, StagingPool

_TIMED_SEGMENTS = 8
# Number of message sizes for which a slot keeps the place of the digest.
_SIZES_KEPT = 4


class _SlotBuffers:
    """Buffers and events of one slot, made once and reused by every message in the slot.

    Attributes:
        work: the message for kernels: the slot itself or, for a slot in host memory, device memory of the same size.
        over: event recorded after the last operation.
        is_copied_in: the last operation was a copy from host memory, whose end the host may not have seen yet.
        trailer_cpu, digest_cpu: a message's trailer and digest, in pinned memory.
        saved_cpu: digests of payloads that are saved, each a tensor of its own, in pinned memory.
    """

    def __init__(self, slot: Slot, work: Tensor) -> None:
        self.work = work
        self.in_host = work is not slot.memory
        self.over = torch.cuda.Event()
        self.is_copied_in = False
        self.digest_cpu = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self.trailer_cpu = torch.zeros(TRAILER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.trailer = self.trailer_cpu.numpy().data
        self.digest = self.digest_cpu.view(1).numpy().view(np.uint64)
        self.extremes_cpu = torch.zeros(2, dtype=torch.uint8, pin_memory=True)
        saved_cpu = torch.zeros(SAVED_AT_ONCE, dtype=torch.int64, pin_memory=True)
        self.saved_cpu, self.saved = saved_cpu.unbind(), saved_cpu.numpy().view(np.uint64)
        self.work_ptr, self.slot_ptr = work.data_ptr(), slot.memory.data_ptr()
        self.trailer_ptr = self.trailer_cpu.data_ptr()
        # Payload size to the digest's place in the message.
        self.digest_places: dict[int, Tensor] = {}


@dataclass(frozen=True)
class _Queued:
    """An operation queued on the device; its results are in the slot's buffers."""

    buffers: _SlotBuffers

    @property
    def done(self) -> bool:
        return bool(self.buffers.over.query())

    @property
    def digest(self) -> int:
        return int(self.buffers.digest[0])

    @property
    def trailer(self) -> bytes:
        return bytes(self.buffers.trailer)

    @property
    def extremes(self) -> tuple[int, int]:
        lowest, highest = self.buffers.extremes_cpu.tolist()
        return lowest, highest


@dataclass(frozen=True)
class _Saving(_Queued):
    """Payloads that the device copies to host memory."""

    count: int

    @property
    def digests(self) -> list[int]:
        digests: list[int] = self.buffers.saved[: self.count].tolist()
        return digests


class CudaMover:
    """The mover for a cache in GPU memory. It sets the calling thread's device and stream for the thread's life.

    The host does little per segment. A sender copies the trailer to the end of the payload's place, launches the
    gather, which digests into that trailer, and records an event. A receiver does the same for the digest, and again
    for the scatter. Nothing is allocated after a pool has been used once; tables for block ids exist from the start.
    """

    on_gpu = True

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._device = cache.storage.device
        self._buffers: dict[Slot, _SlotBuffers] = {}
        # UCX opens its CUDA transports in the context that is current when UCX is opened.
        torch.cuda.set_device(self._device)
        # A gather is short and a peer waits for it, so it has priority over a prefill's kernels. A scatter runs next to
        # decode and has none.
        self._outgoing = torch.cuda.Stream(self._device, priority=-1)
        self._incoming = torch.cuda.Stream(self._device)
        # A load's message is copied, checked and scattered on streams of their own. On one stream, the scatter of a
        # message would come after the checks that are queued already, which wait for the copies of later messages.
        self._copies = torch.cuda.Stream(self._device)
        self._checks = torch.cuda.Stream(self._device)
        # NOTE: torch operations of this thread must not use the default stream, which is the engine's.
        torch.cuda.set_stream(self._incoming)
        self._parts = cache.parts
        self._wires = [DeviceWire(part) for part in self._parts]
        self._wire = self._wires[0]
        self._copy = open_copy()
        self._tables = {
            incoming: BlockTables(stream, self._copy, max_blocks=cache.shape.num_blocks)
            for incoming, stream in ((False, self._outgoing), (True, self._incoming))
        }
        self.handling_s = self._time_handling()
        # The host waits once, before there are peers. From then on the cache is zeroed, and no kernel of ours uses
        # memory that torch's allocator may give out again.
        torch.cuda.synchronize()

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        device = torch.device("cpu") if through_host else self._device
        pool = StagingPool(slot_bytes=slot_bytes, slots=slots, device=device, pinned=through_host)
        for slot in pool.members:
            work = torch.empty(slot_bytes, dtype=torch.uint8, device=self._device) if through_host else slot.memory
            self._buffers[slot] = _SlotBuffers(slot, work)
        # This stream may have used the memory before, and other streams use it from now on. Allocation waits anyway.
        self._incoming.synchronize()
        return pool

    def place(self, block_ids: Sequence[int], *, incoming: bool, state_slot: int = -1) -> PlacedTables:
        check_blocks(self._cache, block_ids, state_slot)
        tables = self._tables[incoming]
        return PlacedTables(tables.place(block_ids), tables.place((state_slot,)) if state_slot >= 0 else None)

    def gather(
        self,
        slot: Slot,
        blocks: Blocks,
        segment: Segment,
        place: PartPlace,
        *,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> _Queued:
        table = self._table(blocks, place)
        buffers = self._buffers[slot]
        digest_place = self._put_trailer(slot, buffers, segment)
        digest_out = digest_place if with_digest else None
        if converter is None:
            self._wires[place.part].gather(
                block_ids=table.block_ids,
                token_start=place.token_start,
                token_stop=place.token_stop,
                layers=place.layers,
                heads=place.heads,
                out=buffers.work,
                digest_out=digest_out,
                digest_add=segment.summand if with_digest else 0,
                stream=self._outgoing,
            )
        else:
            with torch.cuda.stream(self._outgoing):
                gather_converted(
                    self._cache,
                    converter,
                    block_ids=table.block_ids[: table.count],
                    token_start=place.token_start,
                    token_stop=place.token_stop,
                    layers=place.layers,
                    heads=place.heads,
                    out=buffers.work[: segment.payload_bytes],
                )
            self._digest(buffers, segment, digest_out)
        return self._put(buffers, segment)

    def fill(self, slot: Slot, segment: Segment, value: int | None, *, with_digest: bool) -> _Queued:
        buffers = self._buffers[slot]
        if value is None:
            sealed = segment.digest_over(0) if with_digest else 0
            self._put_trailer(slot, buffers, segment, digest=sealed)
            return self._put(buffers, segment)
        digest_place = self._put_trailer(slot, buffers, segment)
        with torch.cuda.stream(self._outgoing):
            buffers.work[: segment.payload_bytes].fill_(value)
        self._digest(buffers, segment, digest_place if with_digest else None)
        return self._put(buffers, segment)

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> _Queued:
        buffers, stream = self._buffers[slot], self._incoming
        payload_bytes = num_bytes - TRAILER_BYTES
        if buffers.is_copied_in:
            buffers.is_copied_in, stream = False, self._checks
            stream.wait_event(buffers.over)
        if buffers.in_host:
            buffers.trailer[:] = slot.bytes[payload_bytes:num_bytes]
            self._copy(buffers.work_ptr, buffers.slot_ptr, payload_bytes, stream.cuda_stream)
        else:
            self._copy(buffers.trailer_ptr, buffers.work_ptr + payload_bytes, TRAILER_BYTES, stream.cuda_stream)
        if with_digest:
            self._wire.digest(buffers.work, payload_bytes, out=buffers.digest_cpu, stream=stream)
        if with_extremes and payload_bytes:
            payload = buffers.work[:payload_bytes]
            with torch.cuda.stream(stream):
                buffers.extremes_cpu.copy_(torch.stack((payload.amin(), payload.amax())), non_blocking=True)
        return self._end(buffers, stream)

    def scatter(self, slot: Slot, blocks: Blocks, segment: Segment, place: PartPlace) -> _Queued:  # noqa: ARG002
        table = self._table(blocks, place)
        buffers = self._buffers[slot]
        self._wires[place.part].scatter(
            block_ids=table.block_ids,
            token_start=place.token_start,
            token_stop=place.token_stop,
            layers=place.layers,
            heads=place.heads,
            payload=buffers.work,
            stream=self._incoming,
        )
        return self._end(buffers, self._incoming)

    def open_host_memory(self, num_bytes: int) -> HostPages:
        return HostPages(num_bytes, pinned=True)

    def save(self, slot: Slot, payloads: Sequence[SavedPayload]) -> _Saving:
        buffers, stream = self._buffers[slot], self._outgoing
        assert not buffers.in_host
        tables = [self._table(payload.blocks, payload.place) for payload in payloads]
        # The stream runs one after another, so all of them use the slot, and the host waits for the last one only.
        gather, form, handle = None, None, stream.cuda_stream
        for table, payload, digest in zip(tables, payloads, buffers.saved_cpu, strict=False):
            part, layers, start, stop, heads = payload.place
            if gather is None or form != (table, part, layers, stop - start, heads):
                form = table, part, layers, stop - start, heads
                gather = self._wires[part].gathers(
                    block_ids=table.block_ids,
                    num_tokens=stop - start,
                    layers=layers,
                    heads=heads,
                    out=buffers.work,
                    stream=stream,
                )
            gather(start, digest)
            self._copy(payload.address, buffers.work_ptr, payload.to.nbytes, handle)
        buffers.over.record(stream)
        return _Saving(buffers, len(payloads))

    def copy_in(self, slot: Slot, num_bytes: int, source: Tensor) -> _Queued:
        assert source.numel() == num_bytes
        buffers = self._buffers[slot]
        assert not buffers.in_host
        self._copy(buffers.work_ptr, source.data_ptr(), num_bytes, self._copies.cuda_stream)
        buffers.is_copied_in = True
        return self._end(buffers, self._copies)

    def close(self) -> None:
        for stream in (self._outgoing, self._incoming, self._copies, self._checks):
            stream.synchronize()

    def _table(self, blocks: Blocks, place: PartPlace) -> BlockTable:
        """The block table of the place's part. Raises InternalError if its blocks do not hold the place's tokens."""
        assert isinstance(blocks, PlacedTables)
        part = self._parts[place.part]
        table = blocks.slot if part.spec.kind is KVKind.STATE else blocks.paged
        held = 0 if table is None else table.count * part.shape.block_size
        if table is None or place.token_stop > held:
            raise InternalError(
                f"the request's blocks hold {held} tokens, not [{place.token_start}, {place.token_stop})",
                field="token_stop",
            )
        return table

    def _put_trailer(self, slot: Slot, buffers: _SlotBuffers, segment: Segment, *, digest: int = 0) -> Tensor:
        """Puts the trailer after the payload's place; returns the digest's place in it, at any alignment."""
        start = segment.payload_bytes
        if buffers.in_host:
            slot.bytes[start : start + TRAILER_BYTES] = segment.encode(digest)
        else:
            buffers.trailer[:] = segment.encode(digest)
            self._copy(buffers.work_ptr + start, buffers.trailer_ptr, TRAILER_BYTES, self._outgoing.cuda_stream)
        place = buffers.digest_places.get(start)
        if place is None:
            place = slot.memory[start + DIGEST_OFFSET :][:DIGEST_BYTES]
            if len(buffers.digest_places) == _SIZES_KEPT:
                buffers.digest_places.clear()
            buffers.digest_places[start] = place
        return place

    def _digest(self, buffers: _SlotBuffers, segment: Segment, out: Tensor | None) -> None:
        if out is not None:
            self._wire.digest(
                buffers.work, segment.payload_bytes, out=out, digest_add=segment.summand, stream=self._outgoing
            )

    def _put(self, buffers: _SlotBuffers, segment: Segment) -> _Queued:
        """Copies the payload into the slot if the slot is in host memory, and ends the operation."""
        if buffers.in_host:
            self._copy(buffers.slot_ptr, buffers.work_ptr, segment.payload_bytes, self._outgoing.cuda_stream)
        return self._end(buffers, self._outgoing)

    def _end(self, buffers: _SlotBuffers, stream: torch.cuda.Stream) -> _Queued:
        buffers.over.record(stream)
        return _Queued(buffers)

    def _time_handling(self) -> float:
        """Runs every kernel and returns the host time per segment, the larger of sender's and receiver's."""
        spec = self._cache.spec
        size = spec.bytes_per_token_layer
        (slot,) = self.open_pool(slot_bytes=size + TRAILER_BYTES, slots=1, through_host=False).members
        segment = Segment(0, 0, 0, 0, 1, 0, 1, 0, spec.num_kv_heads, size)
        place = PartPlace(0, segment.layers, 0, 1, segment.heads)
        # No cache has this block, so nothing is read or written.
        nowhere = {incoming: PlacedTables(self._tables[incoming].place((-1,)), None) for incoming in (False, True)}
        took_s = []
        # Makes that stream's scratch memory, so that the first load allocates nothing.
        self._wire.digest(slot.memory, size, out=self._buffers[slot].digest_cpu, stream=self._checks)
        for with_digest in (False, *[True] * _TIMED_SEGMENTS):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            self.gather(slot, nowhere[False], segment, place, with_digest=with_digest)
            gathered_s = time.perf_counter()
            self.read(slot, size + TRAILER_BYTES, with_digest=True, with_extremes=False)
            self.scatter(slot, nowhere[True], segment, place)
            took_s.append(max(gathered_s - started_s, time.perf_counter() - gathered_s))
        for tables in nowhere.values():
            tables.free()
        del self._buffers[slot]
        return min(took_s)
