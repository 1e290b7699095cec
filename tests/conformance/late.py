"""A CpuMover whose operations run later: when a test releases them, or after some polls. They are the real operations,
and read and write only then, so reusing a slot or a block too early shows."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.wire.conversion import Converter
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.movers.mover import Blocks, DoneReading, DoneSaving, MoveDone, SavedPayload
from kvtransfer.parts import PartPlace
from kvtransfer.segments import TRAILER_BYTES, Segment
from kvtransfer.staging import Slot, StagingPool

POLLS_MAX = 6


@dataclass(eq=False)
class Operation:
    """An operation that has begun. It runs on the transfer thread, at the first poll after its release and after the
    end of the operation that it follows."""

    kind: str
    segment: Segment | None
    happen: Callable[[], MoveDone | DoneReading | DoneSaving]
    polls_left: int
    follows: "Operation | None" = None
    polls: int = 0
    result: MoveDone | DoneReading | DoneSaving | None = None

    @property
    def done(self) -> bool:
        self.polls += 1
        if self.follows is not None and not self.follows.done:
            return False
        if self.result is None and self.polls_left >= 0 and self.polls > self.polls_left:
            self.result = self.happen()
        return self.result is not None

    @property
    def digest(self) -> int:
        assert isinstance(self.result, DoneReading)
        return self.result.digest

    @property
    def digests(self) -> tuple[int, ...]:
        assert isinstance(self.result, DoneSaving)
        return self.result.digests

    @property
    def trailer(self) -> bytes:
        assert isinstance(self.result, DoneReading)
        return self.result.trailer

    @property
    def extremes(self) -> tuple[int, int]:
        assert isinstance(self.result, DoneReading)
        return self.result.extremes


@dataclass
class Script:
    """When operations run: those of the kinds in `held` when they are released, all others after a few polls each, so
    that they overtake each other."""

    held: frozenset[str] = frozenset()
    seed: int = 0
    begun: list[Operation] = field(default_factory=list)
    placed: "set[WatchedBlocks]" = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def begin(
        self,
        kind: str,
        segment: Segment | None,
        happen: Callable[[], MoveDone | DoneReading | DoneSaving],
        follows: Operation | None = None,
    ) -> Operation:
        with self._lock:
            polls = -1 if kind in self.held else self._random.randrange(POLLS_MAX)
            operation = Operation(kind, segment, happen, polls, follows)
            self.begun.append(operation)
            return operation

    def waiting(self) -> list[Operation]:
        """The held operations, in the order in which they began."""
        with self._lock:
            return [operation for operation in self.begun if operation.polls_left < 0]

    def release(self, operation: Operation) -> None:
        operation.polls_left = operation.polls

    def release_all(self) -> None:
        """Releases all operations, from now on."""
        with self._lock:
            self.held = frozenset()
        for operation in self.waiting():
            self.release(operation)


@dataclass(frozen=True, eq=False)
class WatchedBlocks:
    """Blocks that must not be freed while an operation uses them, and are freed once."""

    script: Script
    blocks: Blocks

    def use(self) -> Blocks:
        assert self in self.script.placed, "the blocks were freed before"
        return self.blocks

    def free(self) -> None:
        self.blocks.free()
        self.script.placed.remove(self)


class LateMover:
    """A `CpuMover` whose operations run later, as its script says.

    Args:
        cpu: runs the operations.
        on_gpu: it looks like the mover of a GPU.
    """

    handling_s = 0.0

    def __init__(self, cpu: CpuMover, script: Script, *, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        self._cpu = cpu
        self._script = script
        # The operation of each slot that `read` may follow.
        self._first: dict[Slot, Operation] = {}

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        return self._cpu.open_pool(slot_bytes=slot_bytes, slots=slots, through_host=through_host)

    def place(self, block_ids: Sequence[int], *, incoming: bool, state_slot: int = -1) -> WatchedBlocks:
        blocks = self._cpu.place(block_ids, incoming=incoming, state_slot=state_slot)
        placed = WatchedBlocks(self._script, blocks)
        self._script.placed.add(placed)
        return placed

    def gather(
        self,
        slot: Slot,
        blocks: Blocks,
        segment: Segment,
        place: PartPlace,
        *,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> Operation:
        # Wrong ranges are an error at once. Into other memory, so that the slot is not written yet.
        elsewhere = Slot(-1, torch.empty(segment.payload_bytes + TRAILER_BYTES, dtype=torch.uint8))
        gather = partial(self._cpu.gather, segment=segment, place=place, converter=converter)
        assert isinstance(blocks, WatchedBlocks)
        gather(elsewhere, blocks.use(), with_digest=False)
        happen = partial(gather, slot, with_digest=with_digest)
        return self._script.begin("gather", segment, lambda: happen(blocks.use()))

    def fill(self, slot: Slot, segment: Segment, value: int | None, *, with_digest: bool) -> Operation:
        fill = partial(self._cpu.fill, slot, segment, value, with_digest=with_digest)
        return self._script.begin("fill", segment, fill)

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> Operation:
        return self._script.begin(
            "read",
            None,
            lambda: self._cpu.read(slot, num_bytes, with_digest=with_digest, with_extremes=with_extremes),
            self._first.pop(slot, None),
        )

    def scatter(self, slot: Slot, blocks: Blocks, segment: Segment, place: PartPlace) -> Operation:
        assert isinstance(blocks, WatchedBlocks)
        return self._script.begin("scatter", segment, lambda: self._cpu.scatter(slot, blocks.use(), segment, place))

    def open_host_memory(self, num_bytes: int) -> HostPages:
        return self._cpu.open_host_memory(num_bytes)

    def save(self, slot: Slot, payloads: Sequence[SavedPayload]) -> Operation:
        # As for `gather`.
        for payload in payloads:
            elsewhere = memoryview(bytearray(payload.to.nbytes))
            self._cpu.save(slot, [self._in_use(payload)._replace(to=elsewhere)])
        return self._script.begin("save", None, lambda: self._cpu.save(slot, list(map(self._in_use, payloads))))

    def _in_use(self, payload: SavedPayload) -> SavedPayload:
        assert isinstance(payload.blocks, WatchedBlocks)
        return payload._replace(blocks=payload.blocks.use())

    def copy_in(self, slot: Slot, num_bytes: int, source: Tensor) -> Operation:
        copy = partial(self._cpu.copy_in, slot, num_bytes, source)
        self._first[slot] = copying = self._script.begin("copy_in", None, copy)
        return copying

    def close(self) -> None:
        """Runs what has begun, as on a GPU."""
        for operation in self._script.begun:
            if operation.result is None:
                operation.result = operation.happen()


def late(script: Script, *, on_gpu: bool = False) -> Callable[[PagedKVCache, Callable[[], object]], LateMover]:
    """For `make_mover` of a KVTransfer."""
    return lambda cache, between: LateMover(CpuMover(cache, between), script, on_gpu=on_gpu)
