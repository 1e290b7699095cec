"""The mover for a cache on the CPU: every operation is done when it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVKind
from baton.kvcache.wire.conversion import Converter, gather_converted
from baton.kvcache.wire.digest import digest
from baton.kvcache.wire.gather_scatter import gather_to_wire, scatter_from_wire
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.movers.mover import Blocks, DoneReading, DoneSaving, MoveDone, SavedPayload, check_blocks
from kvtransfer.parts import PartPlace
from kvtransfer.segments import TRAILER_BYTES, Segment
from kvtransfer.staging import Slot, StagingPool


@dataclass(frozen=True)
class PlacedBlocks:
    """Blocks of a request in each part of a cache on the CPU, int64; a state's block is its slot."""

    block_ids: tuple[Tensor, ...]

    def free(self) -> None:
        pass


class CpuMover:
    """Gathers and scatters segments of a cache in main memory.

    Args:
        between: called repeatedly during long operations, so that messages advance meanwhile.
    """

    on_gpu = False
    handling_s = 0.0

    def __init__(self, cache: PagedKVCache, between: Callable[[], object]) -> None:
        self._cache = cache
        self._parts = cache.parts
        self._between = between
        self._gathered = torch.zeros((), dtype=torch.int64)

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        assert not through_host
        return StagingPool(slot_bytes=slot_bytes, slots=slots, device=torch.device("cpu"))

    def place(
        self,
        block_ids: Sequence[int],
        *,
        incoming: bool,  # noqa: ARG002
        state_slot: int = -1,
    ) -> PlacedBlocks:
        check_blocks(self._cache, block_ids, state_slot)
        paged = torch.tensor(block_ids, dtype=torch.int64)
        slots = torch.tensor([state_slot] if state_slot >= 0 else [], dtype=torch.int64)
        return PlacedBlocks(tuple(slots if part.spec.kind is KVKind.STATE else paged for part in self._parts))

    def gather(
        self,
        slot: Slot,
        blocks: Blocks,
        segment: Segment,
        place: PartPlace,
        *,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> MoveDone:
        payload = slot.message(segment.payload_bytes)
        digest = self._gather(blocks, place, payload, with_digest=with_digest, converter=converter)
        return self._seal(slot, segment, segment.digest_over(digest) if with_digest else 0)

    def fill(self, slot: Slot, segment: Segment, value: int | None, *, with_digest: bool) -> MoveDone:
        digest = 0
        if value is not None:
            payload = slot.message(segment.payload_bytes).fill_(value)
            digest = self._digest(payload) if with_digest else 0
        return self._seal(slot, segment, segment.digest_over(digest) if with_digest else 0)

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> DoneReading:
        payload = slot.message(num_bytes - TRAILER_BYTES)
        trailer = bytes(slot.bytes[num_bytes - TRAILER_BYTES : num_bytes])
        lowest, highest = (0, 0)
        if with_extremes and payload.numel():
            lowest, highest = (int(extreme) for extreme in torch.aminmax(payload))
        return DoneReading(trailer, self._digest(payload) if with_digest else 0, (lowest, highest))

    def scatter(self, slot: Slot, blocks: Blocks, segment: Segment, place: PartPlace) -> MoveDone:
        assert isinstance(blocks, PlacedBlocks)
        scatter_from_wire(
            self._parts[place.part],
            block_ids=blocks.block_ids[place.part],
            token_start=place.token_start,
            token_stop=place.token_stop,
            layers=place.layers,
            heads=place.heads,
            payload=slot.message(segment.payload_bytes),
        )
        return MoveDone()

    def open_host_memory(self, num_bytes: int) -> HostPages:
        return HostPages(num_bytes, pinned=False)

    def save(self, slot: Slot, payloads: Sequence[SavedPayload]) -> DoneSaving:
        del slot  # a CPU gathers into host memory itself
        digests = [
            self._gather(each.blocks, each.place, torch.frombuffer(each.to, dtype=torch.uint8), with_digest=True)
            for each in payloads
        ]
        return DoneSaving(tuple(digests))

    def copy_in(self, slot: Slot, num_bytes: int, source: Tensor) -> MoveDone:
        slot.message(num_bytes).copy_(source)
        return MoveDone()

    def close(self) -> None:
        pass

    def _gather(
        self, blocks: Blocks, place: PartPlace, out: Tensor, *, with_digest: bool, converter: Converter | None = None
    ) -> int:
        """Gathers a payload. Returns its digest, or any number without `with_digest`."""
        assert isinstance(blocks, PlacedBlocks)
        if converter is None:
            gather = partial(gather_to_wire, digest_out=self._gathered if with_digest else None)
        else:
            gather = partial(gather_converted, converter=converter)
        gather(
            self._parts[place.part],
            block_ids=blocks.block_ids[place.part],
            token_start=place.token_start,
            token_stop=place.token_stop,
            layers=place.layers,
            heads=place.heads,
            out=out,
            between=self._between,
        )
        if converter is not None:
            return self._digest(out) if with_digest else 0
        # The tensor is signed: modulo 2^64 makes it the unsigned digest.
        return int(self._gathered) % (1 << 64)

    def _seal(self, slot: Slot, segment: Segment, digest: int) -> MoveDone:
        slot.bytes[segment.payload_bytes : segment.payload_bytes + TRAILER_BYTES] = segment.encode(digest)
        return MoveDone()

    def _digest(self, payload: Tensor) -> int:
        return digest(payload, between=self._between)
