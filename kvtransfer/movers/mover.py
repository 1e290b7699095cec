"""What moves KV between the cache and staging slots: the Protocol that every mover fulfils.

A mover begins an operation and gives something that says when it is done; nobody waits for it, whoever began it looks
again. Knows segments and slots, and nothing of leases, jobs and transports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import InternalError
from kvcache.cache import PagedKVCache
from kvcache.wire.conversion import Converter
from kvtransfer.segments import Segment
from kvtransfer.staging import Slot, StagingPool


class Pending(Protocol):
    """An operation that was begun. Its slot, and the blocks that it reads or writes, must stay until it is done."""

    @property
    def done(self) -> bool: ...


class Blocks(Protocol):
    """The blocks of one request, where a mover has them at hand."""

    def free(self) -> None:
        """Nothing that uses them is under way or will be begun."""
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

    def place(self, block_ids: Sequence[int], *, incoming: bool) -> Blocks:
        """A request's blocks, for its gathers or, incoming, for its scatters; to be freed after the last.

        Raises:
            InternalError: there are no such blocks.
        """
        ...

    def gather(
        self,
        slot: Slot,
        blocks: Blocks,
        segment: Segment,
        *,
        heads: range,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> Pending:
        """Puts a segment's message into a slot: its payload, and its trailer behind that.

        Args:
            heads: the segment's, by the cache's numbers.
            with_digest: whether the trailer gets one.
            converter: what the numbers become; they stay as they are if not given. Must stay as long as the operation
                does.

        Raises:
            InternalError: the blocks hold no such tokens, or the cache no such layers or heads; nothing was begun.
        """
        ...

    def fill(self, slot: Slot, segment: Segment, value: int | None, *, with_digest: bool) -> Pending:
        """Puts a message into a slot whose payload is of equal bytes, or what the slot holds; its digest says nothing
        then."""
        ...

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> Reading:
        """Reads the trailer of a message, and what its payload says."""
        ...

    def scatter(self, slot: Slot, blocks: Blocks, segment: Segment) -> Pending:
        """Puts a segment's payload from a slot into its blocks. Its heads are by the cache's numbers."""
        ...

    def close(self) -> None:
        """Waits for all that was begun: its memory goes away."""
        ...


@dataclass(frozen=True)
class Done:
    """Something that is done already."""

    done: bool = True


@dataclass(frozen=True)
class DoneReading:
    """A reading that is done already."""

    trailer: bytes
    digest: int = 0
    extremes: tuple[int, int] = (0, 0)
    done: bool = True


# Makes the mover of a cache; the function is `between` of `CpuMover`.
MakeMover = Callable[[PagedKVCache, Callable[[], object]], Mover]


def check_blocks(block_ids: Sequence[int], num_blocks: int) -> None:
    """Raises InternalError unless a cache of so many blocks has them all."""
    if block_ids and (min(block_ids) < 0 or max(block_ids) >= num_blocks):
        raise InternalError(f"block ids from {min(block_ids)} to {max(block_ids)} of {num_blocks}", field="block_ids")
