"""A receiver's surroundings in a simulated world: messages, a transport, a mover and a lease's owner, all passive.

Slots and blocks hold numbers of messages, so that nothing has to be copied.
"""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.core.errors import BatonError, DataLoss
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.leases import LeaseTotals
from kvtransfer.movers.cpu import PlacedBlocks
from kvtransfer.parts import PartPlace
from kvtransfer.segments import TRAILER_BYTES, Segment, Tag
from kvtransfer.staging import Slot
from kvtransfer.transports.transport import Arrival
from tests.conformance.kv_sides import CANCELLED, CANCELLING, READ, READING, RECEIVED, RECEIVING, SCATTERING

SPEC = KVCacheSpec(KVKind.MLA, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
INCARNATION = 5
MESSAGE_BYTES = SPEC.bytes_per_token + TRAILER_BYTES


@dataclass(frozen=True, eq=False)
class Message:
    """One token of one lease.

    Attributes:
        side: the lease, and which of the peers sends it.
        number: the token's number in the lease, from 1.
        blocks: the blocks that it belongs to.
        trailer: the encoded `segment`.
    """

    side: int
    number: int
    tag: Tag
    segment: Segment
    blocks: list[int]
    trailer: bytes
    arrival: Arrival

    def __post_init__(self) -> None:
        object.__setattr__(self.arrival, "handle", self)


def make_message(side: int, peer: int, number: int, segments: int) -> Message:
    token = number - 1
    tag = Tag(peer, side, token)
    segment = Segment(INCARNATION, side, token, 0, 1, token, token + 1, 0, 1, SPEC.bytes_per_token)
    arrival = Arrival(peer, tag.pack(), MESSAGE_BYTES, None)
    blocks = [side * segments + token]
    return Message(side, number, tag, segment, blocks, segment.encode(segment.digest), arrival)


@dataclass(eq=False, slots=True)
class Passing:
    """A message that was given a slot: the request that receives it, the reading and the scatter in one, because they
    follow each other."""

    message: Message
    slot: int
    stage: int = RECEIVING


@dataclass(eq=False, slots=True)
class Receive:
    passing: Passing

    @property
    def done(self) -> bool:
        return self.passing.stage not in (RECEIVING, CANCELLING)

    def failure(self) -> BatonError | None:
        return DataLoss("the link was closed") if self.passing.stage == CANCELLED else None


@dataclass(eq=False, slots=True)
class Copy:
    """A reading or a scatter.

    Attributes:
        runs: the stage of its message until it is done.
    """

    passing: Passing
    runs: int
    digest: int = 0
    extremes: tuple[int, int] = (0, 0)

    @property
    def done(self) -> bool:
        return self.passing.stage > self.runs

    @property
    def trailer(self) -> bytes:
        assert self.passing.stage >= READ
        return self.passing.message.trailer


@dataclass(eq=False)
class Surroundings:
    """Transport and mover of a receiver. An operation is begun only on a slot on which none runs.

    Attributes:
        queues: by peer, messages that have arrived and were not probed; probed in this order.
        by_slot: the message that each slot was last given to.
        ended: leases that were closed.
        discarded: messages discarded since the list was emptied.
    """

    slot_at: dict[int, int]
    queues: dict[int, deque[Message]]
    by_slot: list[Passing | None]
    ended: Container[int]
    discarded: list[Message] = field(default_factory=list)

    # ---- a transport

    def probe(self) -> Arrival | None:
        for queue in self.queues.values():
            if queue:
                return queue.popleft().arrival
        return None

    def receive(self, arrival: Arrival, into: Tensor) -> Receive:
        slot = self.slot_at[into.data_ptr()]
        before = self.by_slot[slot]
        assert before is None or before.stage % 2, "a slot is used by one operation at a time"
        assert isinstance(arrival.handle, Message)
        passing = self.by_slot[slot] = Passing(arrival.handle, slot)
        return Receive(passing)

    def discard(self, arrival: Arrival) -> None:
        assert isinstance(arrival.handle, Message)
        self.discarded.append(arrival.handle)

    # ---- a mover

    def read(self, slot: Slot, num_bytes: int, *, with_digest: bool, with_extremes: bool) -> Copy:
        assert (num_bytes, with_digest, with_extremes) == (MESSAGE_BYTES, False, False)
        passing = self._at(slot)
        assert passing.stage == RECEIVED, "a message is read after it has arrived"
        passing.stage = READING
        return Copy(passing, READING)

    def place(self, block_ids: Sequence[int], *, incoming: bool, state_slot: int) -> PlacedBlocks:
        assert incoming
        assert state_slot == -1
        return PlacedBlocks((torch.tensor(block_ids),))

    def scatter(self, slot: Slot, blocks: PlacedBlocks, segment: Segment, place: PartPlace) -> Copy:
        passing = self._at(slot)
        assert passing.stage == READ, "a message is scattered after it is read"
        assert passing.message.side not in self.ended, "I3: scattered after its lease was closed"
        written = blocks.block_ids[place.part][segment.token_start : segment.token_stop].tolist()
        assert written == passing.message.blocks, "I3: another lease's blocks, or another token's"
        passing.stage = SCATTERING
        return Copy(passing, SCATTERING)

    def _at(self, slot: Slot) -> Passing:
        passing = self.by_slot[slot.index]
        assert passing is not None
        return passing


@dataclass(eq=False, slots=True)
class Owner:
    """The owner of a lease; waits for its end after `close`."""

    totals: LeaseTotals | None = None

    def set_result(self, totals: LeaseTotals) -> None:
        assert self.totals is None, "a lease ends once"
        self.totals = totals

    def set_exception(self, error: Exception) -> None:
        raise error
