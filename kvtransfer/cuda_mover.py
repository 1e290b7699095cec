"""The mover for a cache on a GPU: kernels and copies on streams of their own, whose ends are polled with events.

The host waits for nothing here: not for a kernel, not for the eight bytes of a digest, which go to pinned memory by an
asynchronous copy. Knows nothing of the engine and of its stream. The order between the two is kept by the host: the
engine tells of a chunk once its step is over, and of a lease's blocks once nothing of its own uses them; it hears of
a filled lease once the last scatter is over, and of a sent chunk once UCX has sent it, which is after the gather.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from attention.cache import PagedKVCache
from attention.cache_ops import (
    Converter,
    digest_on_device,
    gather_converted,
    gather_to_wire,
    scatter_from_wire,
)
from attention.spec import KVCacheSpec
from kvtransfer.segments import TRAILER_BYTES, Segment
from kvtransfer.staging import Slot, StagingPool

_DIGEST_MASK = (1 << 64) - 1
_TIMED_SEGMENTS = 8


class _Desk:
    """What is needed beside a slot, made once; whoever holds the slot uses it.

    Attributes:
        work: the message as kernels see it: the slot itself, or device memory of the same size beside a slot in host
            memory.
        over: recorded behind the last operation.
    """

    def __init__(self, work: Tensor, *, max_blocks: int) -> None:
        self.work = work
        self.over = torch.cuda.Event()
        self.block_ids = torch.empty(max_blocks, dtype=torch.int64, device=work.device)
        self.block_ids_cpu = torch.empty(max_blocks, dtype=torch.int64, pin_memory=True)
        self.digest = torch.empty((), dtype=torch.int64, device=work.device)
        self.digest_cpu = torch.empty((), dtype=torch.int64, pin_memory=True)
        self.trailer_cpu = torch.empty(TRAILER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.extremes_cpu = torch.empty(2, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True)
class _Queued:
    """An operation that the device was told of; what it left is read from the desk."""

    desk: _Desk

    @property
    def done(self) -> bool:
        return bool(self.desk.over.query())

    @property
    def digest(self) -> int:
        return int(self.desk.digest_cpu) & _DIGEST_MASK

    @property
    def trailer(self) -> bytes:
        return self.desk.trailer_cpu.numpy().tobytes()

    @property
    def extremes(self) -> tuple[int, int]:
        lowest, highest = self.desk.extremes_cpu.tolist()
        return lowest, highest


class CudaMover:
    """For a cache in a GPU's memory. Sets the calling thread's device and stream, for as long as the thread lives.

    Nothing is allocated after a pool has been used once: block ids go through buffers of each slot, and the digest's
    partial sums are of one size for each size of a payload, which torch's allocator hands out again.
    """

    on_gpu = True

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._device = cache.storage.device
        self._desks: dict[Slot, _Desk] = {}
        # UCX opens its CUDA transports in the context that is current when it is made.
        torch.cuda.set_device(self._device)
        # A gather is short and a peer waits for it: where it meets a prefill's kernels, its programs are placed first.
        # A scatter meets decode, and has no such right.
        self._outgoing = torch.cuda.Stream(self._device, priority=-1)
        self._incoming = torch.cuda.Stream(self._device)
        # Trailers, so that none waits for the gathers queued behind its own.
        self._trailers = torch.cuda.Stream(self._device, priority=-1)
        # NOTE: what this thread does elsewhere must not join the default stream, which is the engine's.
        torch.cuda.set_stream(self._incoming)
        self._compile()
        self.handling_s = self._time_handling()
        # Waits, but before any peer is there: what filled the cache with zeros is over then, and no kernel of ours uses
        # memory that torch's allocator may hand out again.
        torch.cuda.synchronize()

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        device = torch.device("cpu") if through_host else self._device
        pool = StagingPool(slot_bytes=slot_bytes, slots=slots, device=device, pinned=through_host)
        max_blocks = _most_blocks(self._cache.spec, slot_bytes, self._cache.shape.block_size)
        for slot in pool.members:
            beside = torch.empty(slot_bytes, dtype=torch.uint8, device=self._device) if through_host else slot.memory
            self._desks[slot] = _Desk(beside, max_blocks=max_blocks)
        # The memory may have served this stream before; from now on others use it too. Allocating waits anyway.
        self._incoming.synchronize()
        return pool

    def gather(
        self,
        slot: Slot,
        block_ids: Tensor,
        segment: Segment,
        *,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> _Queued:
        desk = self._desks[slot]
        payload = desk.work[: segment.payload_bytes]
        if converter is None:
            gather = partial(gather_to_wire, self._cache)
        else:
            gather = partial(gather_converted, self._cache, converter)
        with torch.cuda.stream(self._outgoing):
            ids, ids_cpu, token_start, token_stop = self._place(desk, block_ids, segment)
            gather(
                block_ids=ids,
                block_ids_cpu=ids_cpu,
                token_start=token_start,
                token_stop=token_stop,
                layers=segment.layers,
                heads=segment.heads,
                out=payload,
                digest_out=desk.digest if with_digest else None,
            )
            return self._put(slot, desk, payload, with_digest=with_digest)

    def fill(self, slot: Slot, num_bytes: int, value: int, *, with_digest: bool) -> _Queued:
        desk = self._desks[slot]
        with torch.cuda.stream(self._outgoing):
            payload = desk.work[:num_bytes].fill_(value)
            if with_digest:
                digest_on_device(payload, out=desk.digest)
            return self._put(slot, desk, payload, with_digest=with_digest)

    def seal(self, slot: Slot, segment: Segment) -> _Queued:
        desk = self._desks[slot]
        desk.trailer_cpu.copy_(torch.frombuffer(bytearray(segment.encode()), dtype=torch.uint8))
        with torch.cuda.stream(self._trailers):
            behind = slot.memory[segment.payload_bytes : segment.payload_bytes + TRAILER_BYTES]
            behind.copy_(desk.trailer_cpu, non_blocking=True)
            return self._end(desk)

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> _Queued:
        desk = self._desks[slot]
        message = desk.work[:num_bytes]
        payload, trailer = message[:-TRAILER_BYTES], message[-TRAILER_BYTES:]
        with torch.cuda.stream(self._incoming):
            if desk.work is not slot.memory:
                message.copy_(slot.memory[:num_bytes], non_blocking=True)
            desk.trailer_cpu.copy_(trailer, non_blocking=True)
            if with_digest:
                digest_on_device(payload, out=desk.digest)
                desk.digest_cpu.copy_(desk.digest, non_blocking=True)
            if with_extremes and payload.numel():
                extremes = torch.stack((payload.amin(), payload.amax()))
                desk.extremes_cpu.copy_(extremes, non_blocking=True)
            return self._end(desk)

    def scatter(self, slot: Slot, block_ids: Tensor, segment: Segment) -> _Queued:
        desk = self._desks[slot]
        with torch.cuda.stream(self._incoming):
            # Without the check of the ids: a lease is opened only for blocks that exist.
            ids, _, token_start, token_stop = self._place(desk, block_ids, segment)
            scatter_from_wire(
                self._cache,
                block_ids=ids,
                token_start=token_start,
                token_stop=token_stop,
                layers=segment.layers,
                heads=segment.heads,
                payload=desk.work[: segment.payload_bytes],
            )
            return self._end(desk)

    def close(self) -> None:
        for stream in (self._outgoing, self._trailers, self._incoming):
            stream.synchronize()

    def _place(self, desk: _Desk, block_ids: Tensor, segment: Segment) -> tuple[Tensor, Tensor, int, int]:
        """The segment's own blocks, on their way to the device and on the CPU, and its tokens counted from their first.

        In the slot's buffers, so that they live as long as the operation does.
        """
        size = self._cache.shape.block_size
        first, stop = segment.token_start // size, -(-segment.token_stop // size)
        own = block_ids[first:stop]
        ids, ids_cpu = desk.block_ids[: len(own)], desk.block_ids_cpu[: len(own)]
        ids_cpu.copy_(own)
        ids.copy_(ids_cpu, non_blocking=True)
        return ids, ids_cpu, segment.token_start - first * size, segment.token_stop - first * size

    def _put(self, slot: Slot, desk: _Desk, payload: Tensor, *, with_digest: bool) -> _Queued:
        if with_digest:
            desk.digest_cpu.copy_(desk.digest, non_blocking=True)
        if desk.work is not slot.memory:
            slot.memory[: payload.numel()].copy_(payload, non_blocking=True)
        return self._end(desk)

    def _end(self, desk: _Desk) -> _Queued:
        desk.over.record()
        return _Queued(desk)

    def _compile(self) -> None:
        """Runs every kernel once for each layer, because a kernel is compiled for how a layer's place divides and for
        whether it needs 64 bits."""
        for layer in range(self._cache.spec.num_layers):
            self._move_nothing(layer, with_digest=False)
            self._move_nothing(layer, with_digest=True)

    def _time_handling(self) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(_TIMED_SEGMENTS):
            self._move_nothing(0, with_digest=True)
        return (time.perf_counter() - start_s) / _TIMED_SEGMENTS

    def _move_nothing(self, layer: int, *, with_digest: bool) -> None:
        """What a segment takes on both sides, for a block that no cache has: nothing of it is read or written."""
        spec = self._cache.spec
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        payload = torch.zeros(spec.bytes_per_token_layer, dtype=torch.uint8, device=self._device)
        digest = torch.empty((), dtype=torch.int64, device=self._device)
        places: _Places = {
            "block_ids": nowhere,
            "token_start": 0,
            "token_stop": 1,
            "layers": range(layer, layer + 1),
            "heads": range(spec.num_kv_heads),
        }
        gather_to_wire(self._cache, out=payload, digest_out=digest if with_digest else None, **places)
        digest_on_device(payload, out=digest)
        scatter_from_wire(self._cache, payload=payload, **places)


class _Places(TypedDict):
    block_ids: Tensor
    token_start: int
    token_stop: int
    layers: range
    heads: range


def _most_blocks(spec: KVCacheSpec, slot_bytes: int, block_size: int) -> int:
    """How many blocks one message's tokens can lie in: one layer and one head of them, and a part of a block at each
    end."""
    # As they travel they may have 8 bits, whatever the cache has.
    most_tokens = slot_bytes // (spec.kv_factor * spec.head_dim)
    return most_tokens // block_size + 2
