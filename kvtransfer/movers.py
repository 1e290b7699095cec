"""Moves KV between the cache and staging slots: what a mover is, and the one for a cache on the CPU.

A mover begins an operation and gives something that says when it is done; nobody waits for it, whoever began it looks
again. Knows segments and slots, and nothing of leases, jobs and transports.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from attention.cache import PagedKVCache
from attention.cache_ops import Converter, digest, gather_converted, gather_to_wire, scatter_from_wire
from kvtransfer.segments import TRAILER_BYTES, Segment
from kvtransfer.staging import Slot, StagingPool


class Pending(Protocol):
    """An operation that was begun. Its slot, and the blocks that it reads or writes, must stay until it is done."""

    @property
    def done(self) -> bool: ...


class Payload(Pending, Protocol):
    """A payload that is being put into a slot."""

    @property
    def digest(self) -> int:
        """Of the payload, if it was asked for; once done."""
        ...


class Reading(Pending, Protocol):
    """What a receiver must know of a message before it may scatter it; all of it once done."""

    @property
    def trailer(self) -> bytes: ...

    @property
    def digest(self) -> int:
        """Of the payload, if it was asked for."""
        ...

    @property
    def extremes(self) -> tuple[int, int]:
        """The payload's lowest and highest byte, if they were asked for."""
        ...


class Mover(Protocol):
    """One cache's side of every transfer. Made, used and closed by the transfer thread.

    Operations on one slot are begun one after the other is done; those on different slots may overlap. `gather` reads
    the cache as it is when it runs, which is any time until it is done: the tokens' KV must be there when it is begun,
    and their blocks must stay as they are until it is done. `scatter` writes to the blocks until it is done, and
    whoever had them before must have ended by then.

    Attributes:
        on_gpu: whether the cache, and staging that a transport reaches directly, is memory of a GPU.
        handling_s: what a segment takes of the thread whatever its size, beside the transport; 0 where that is little.
    """

    on_gpu: bool
    handling_s: float

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        """Staging for operations of this mover. `through_host`: of a cache on a GPU, slots in pinned host memory."""
        ...

    def gather(
        self,
        slot: Slot,
        block_ids: Tensor,
        segment: Segment,
        *,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> Payload:
        """Puts a segment's payload into a slot. `block_ids`: int64, on the CPU, of the whole request.

        Args:
            converter: what the numbers become; they stay as they are if not given. Must stay as long as the operation
                does.

        Raises:
            InternalError: there are no such blocks or ranges; nothing was begun.
        """
        ...

    def fill(self, slot: Slot, num_bytes: int, value: int, *, with_digest: bool) -> Payload:
        """Puts a payload of equal bytes into a slot."""
        ...

    def seal(self, slot: Slot, segment: Segment) -> Pending:
        """Puts the segment's trailer behind its payload."""
        ...

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> Reading:
        """Reads the trailer of a message, and what its payload says."""
        ...

    def scatter(self, slot: Slot, block_ids: Tensor, segment: Segment) -> Pending:
        """Puts a segment's payload from a slot into its blocks. `block_ids` as for `gather`."""
        ...

    def close(self) -> None:
        """Waits for all that was begun: its memory goes away."""
        ...


@dataclass(frozen=True)
class Done:
    """A payload, or nothing, that is done already."""

    digest: int = 0
    done: bool = True


@dataclass(frozen=True)
class DoneReading:
    """A reading that is done already."""

    trailer: bytes
    digest: int = 0
    extremes: tuple[int, int] = (0, 0)
    done: bool = True


class CpuMover:
    """For a cache in the CPU's memory: everything is done at once.

    Args:
        between: called again and again during a digest and a conversion, to keep the transport going.
    """

    on_gpu = False
    handling_s = 0.0

    def __init__(self, cache: PagedKVCache, between: Callable[[], object]) -> None:
        self._cache = cache
        self._between = between

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        assert not through_host
        return StagingPool(slot_bytes=slot_bytes, slots=slots, device=torch.device("cpu"))

    def gather(
        self,
        slot: Slot,
        block_ids: Tensor,
        segment: Segment,
        *,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> Done:
        payload = slot.memory[: segment.payload_bytes]
        if converter is None:
            gather = partial(gather_to_wire, self._cache)
        else:
            gather = partial(gather_converted, self._cache, converter, between=self._between)
        gather(
            block_ids=block_ids,
            token_start=segment.token_start,
            token_stop=segment.token_stop,
            layers=segment.layers,
            heads=segment.heads,
            out=payload,
        )
        return Done(self._digest(payload) if with_digest else 0)

    def fill(self, slot: Slot, num_bytes: int, value: int, *, with_digest: bool) -> Done:
        payload = slot.memory[:num_bytes].fill_(value)
        return Done(self._digest(payload) if with_digest else 0)

    def seal(self, slot: Slot, segment: Segment) -> Done:
        trailer = torch.frombuffer(bytearray(segment.encode()), dtype=torch.uint8)
        slot.memory[segment.payload_bytes : segment.payload_bytes + TRAILER_BYTES].copy_(trailer)
        return Done()

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> DoneReading:
        payload = slot.memory[: num_bytes - TRAILER_BYTES]
        trailer = slot.memory[num_bytes - TRAILER_BYTES : num_bytes].numpy().tobytes()
        lowest, highest = (0, 0)
        if with_extremes and payload.numel():
            lowest, highest = (int(extreme) for extreme in torch.aminmax(payload))
        return DoneReading(trailer, self._digest(payload) if with_digest else 0, (lowest, highest))

    def scatter(self, slot: Slot, block_ids: Tensor, segment: Segment) -> Done:
        scatter_from_wire(
            self._cache,
            block_ids=block_ids,
            token_start=segment.token_start,
            token_stop=segment.token_stop,
            layers=segment.layers,
            heads=segment.heads,
            payload=slot.memory[: segment.payload_bytes],
        )
        return Done()

    def close(self) -> None:
        pass

    def _digest(self, payload: Tensor) -> int:
        return digest(payload, between=self._between)


# Makes the mover of a cache; the function is `between` of `CpuMover`.
MakeMover = Callable[[PagedKVCache, Callable[[], object]], Mover]


def open_mover(cache: PagedKVCache, between: Callable[[], object]) -> Mover:
    """The mover for where the cache is; on a GPU compiles the kernels, which takes seconds the first time."""
    if not cache.storage.is_cuda:
        return CpuMover(cache, between)
    # NOTE: imported here because it is needed only where there is a GPU.
    from kvtransfer.cuda_mover import CudaMover

    return CudaMover(cache)
