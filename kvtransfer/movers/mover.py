"""The Protocol of movers, which move KV between the cache and staging slots.

A mover begins an operation and returns an object that reports when it is done; its caller polls and never waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.wire.conversion import Converter
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.parts import PartPlace
from kvtransfer.segments import Segment
from kvtransfer.staging import Slot, StagingPool

# The most payloads of one `Mover.save`.
SAVED_AT_ONCE = 16


class Pending(Protocol):
    """An operation that has begun. Its slot, and the blocks that it reads or writes, must stay until it is done."""

    @property
    def done(self) -> bool: ...


class Blocks(Protocol):
    """The blocks of one request, as a mover uses them."""

    def free(self) -> None:
        """Releases them. No operation that uses them is in progress or will begin."""
        ...


class CacheReading(Pending, Protocol):
    """The parts of a message that a receiver checks before it scatters the message; available once done."""

    @property
    def trailer(self) -> bytes: ...

    @property
    def digest(self) -> int:
        """The payload's digest, if requested."""
        ...

    @property
    def extremes(self) -> tuple[int, int]:
        """The payload's lowest and highest byte, if requested."""
        ...


class SavedPayload(NamedTuple):
    """A payload on its way from the cache to host memory.

    Attributes:
        blocks: of its request, placed for gathers.
        place: in its part's cache.
        to: the part of host memory for it, which must not change until the operation is done.
        address: of that part.
    """

    blocks: Blocks
    place: PartPlace
    to: memoryview
    address: int


class Saving(Pending, Protocol):
    """Payloads on their way to host memory."""

    @property
    def digests(self) -> Sequence[int]:
        """The digest of each payload, available once done."""
        ...


class Mover(Protocol):
    """Moves KV into and out of one cache and its other parts. The transfer thread makes, uses and closes it.

    Operations on one slot must not overlap; those on different slots may. There is one exception: `read` may be begun
    right after `copy_in` on its slot. It then runs after the copy, and when it is done both are.

    `gather` and `save` may read the cache at any time until they are done: the tokens' KV must be there when they
    begin, and their blocks must not change until they are done. `scatter` may write to the blocks at any time until it
    is done, and nothing else may use them meanwhile.

    Attributes:
        on_gpu: the cache, and staging that a transport reaches directly, are GPU memory.
        handling_s: the thread's time per segment, independent of its size and apart from the transport; 0 if small.
    """

    on_gpu: bool
    handling_s: float

    def open_pool(self, *, slot_bytes: int, slots: int, through_host: bool) -> StagingPool:
        """Staging for operations of this mover. `through_host`: for a cache on a GPU, slots in pinned host memory."""
        ...

    def place(self, block_ids: Sequence[int], *, incoming: bool, state_slot: int = -1) -> Blocks:
        """Prepares a request's blocks for its gathers or, if incoming, for its scatters. Free them after the last one.

        Args:
            state_slot: of the request's state; -1: the state is not moved.

        Raises:
            InternalError: the cache has no such blocks, or no such slot.
        """
        ...

    def gather(
        self,
        slot: Slot,
        blocks: Blocks,
        segment: Segment,
        place: PartPlace,
        *,
        with_digest: bool,
        converter: Converter | None = None,
    ) -> Pending:
        """Puts a segment's message into a slot: its payload, then its trailer.

        Args:
            place: the segment's place in its part's cache.
            with_digest: write a digest into the trailer.
            converter: applied to the payload until the operation is done; None: KV keeps its dtype. Other parts always
                keep theirs.

        Raises:
            InternalError: the blocks hold no such tokens, or the cache no such layers or heads. Nothing has begun.
        """
        ...

    def fill(self, slot: Slot, segment: Segment, value: int | None, *, with_digest: bool) -> Pending:
        """Puts a message into a slot; every byte of its payload has that value. With None the payload is what the slot
        holds, and the digest does not cover it."""
        ...

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> CacheReading:
        """Reads a message's trailer and, if requested, its payload's digest and extremes."""
        ...

    def scatter(self, slot: Slot, blocks: Blocks, segment: Segment, place: PartPlace) -> Pending:
        """Puts a segment's payload from a slot into its blocks."""
        ...

    def open_host_memory(self, num_bytes: int) -> HostPages:
        """Memory for `save` and `copy_in`. Its maker closes it, after the last of these operations.

        Raises:
            ConfigError: the machine cannot give that much.
        """
        ...

    def save(self, slot: Slot, payloads: Sequence[SavedPayload]) -> Saving:
        """Gathers and digests payloads, and copies them to host memory, one after another through a slot.

        Args:
            payloads: up to SAVED_AT_ONCE, each no larger than the slot.

        Raises:
            InternalError: blocks do not hold such tokens, or a cache has no such layers or heads. Nothing has begun.
        """
        ...

    def copy_in(self, slot: Slot, num_bytes: int, source: Tensor) -> Pending:
        """Copies a message from host memory into a slot.

        Args:
            source: a part of host memory with that many bytes; it must not change until the operation is done.
        """
        ...

    def close(self) -> None:
        """Waits for all operations, because their memory is freed next."""
        ...


@dataclass(frozen=True)
class MoveDone:
    """An operation that is done."""

    done: bool = True


@dataclass(frozen=True)
class DoneReading:
    """A reading that is done."""

    trailer: bytes
    digest: int = 0
    extremes: tuple[int, int] = (0, 0)
    done: bool = True


@dataclass(frozen=True)
class DoneSaving:
    """Payloads that are in host memory."""

    digests: tuple[int, ...]
    done: bool = True


# Makes the mover of a cache; the callable is `between` of `CpuMover`.
MakeMover = Callable[[PagedKVCache, Callable[[], object]], Mover]


def check_blocks(cache: PagedKVCache, block_ids: Sequence[int], state_slot: int) -> None:
    """Raises InternalError unless the cache has all these blocks, and the slot, if it is not -1."""
    num_blocks = cache.shape.num_blocks
    if block_ids and (min(block_ids) < 0 or max(block_ids) >= num_blocks):
        ids = f"{min(block_ids)} to {max(block_ids)}"
        raise InternalError(f"block ids are from {ids}, and the cache has {num_blocks} blocks", field="block_ids")
    slots = 0 if cache.state is None else cache.state.shape.num_blocks
    if not -1 <= state_slot < slots:
        raise InternalError(
            f"the state slot is {state_slot}, and the cache has {slots}", field="state_slot", value=state_slot
        )
