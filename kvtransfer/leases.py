"""Decides what may be written into a lease's blocks and when the blocks may be freed. Sans-IO: no clock, no torch.

    open ──► OPEN ──close, nothing is being scattered──────────────────────► closed
              └────close──► CLOSING ──the last running scatter is done──────► closed

The table decides and its caller moves the bytes. It calls `arrival` when a message arrives, `start_scatter` when the
trailer has been read and is known to be the sender's, and `finish_scatter` when the bytes are in the blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import InternalError, UnknownLease
from kvtransfer.coverage import Coverage
from kvtransfer.parts import Part, part_with
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import LEASE_KEY_BYTES, LEASE_NUMBER_BITS, Segment, Tag, lease_field, payload_bytes

# Number of latest leases that are remembered: their numbers are not used again, and their late messages are recognized.
_USED_MAX = 1 << 14


@dataclass(frozen=True)
class LeaseGrant:
    """Permission to write tokens [token_start, token_stop) of one request into its blocks.

    Attributes:
        number: random; its `lease_field` differs from those of open leases and of recent ones.
        block_ids: blocks of the whole request: token i is in block_ids[i // block_size].
        resume_at: first position that may still be computed; None means `token_stop`. KV older than the sliding window
            is not sent.
        prefill_incarnation: of the only node that may fill it; 0: the first node that sends.
        key: LEASE_KEY_BYTES random bytes, which make the seals of its segments; empty: only segments without a seal can
            fill it, from peers of an older wire version.
        state_slot: where the recurrent state after `token_stop` tokens belongs; -1: the model has none.
        owner: the rank that has the blocks and alone receives; None: every rank receives its share.

    Raises:
        InternalError: the number, the range or the key is impossible.
    """

    number: int
    block_ids: tuple[int, ...]
    token_start: int
    token_stop: int
    resume_at: int | None = None
    prefill_incarnation: int = 0
    key: bytes = field(default=b"", repr=False)
    state_slot: int = -1
    owner: int | None = None

    @property
    def reader(self) -> int:
        """The first token that reads the KV."""
        return self.token_stop if self.resume_at is None else self.resume_at

    def __post_init__(self) -> None:
        if not 0 <= self.number < 1 << LEASE_NUMBER_BITS:
            raise InternalError(f"a lease's number is {self.number}", field="number", value=self.number)
        if not 0 <= self.token_start <= self.token_stop:
            raise InternalError(f"a lease is for tokens [{self.token_start}, {self.token_stop})", field="token_stop")
        if len(self.key) not in (0, LEASE_KEY_BYTES):
            raise InternalError(f"a lease's key has {len(self.key)} bytes", field="key")

    def first_wanted(self, part: Part, layer: int) -> int:
        """The first token that is wanted in a layer; `layer` is the part's own number."""
        kept = part.spec.first_kept(self.token_start, self.token_stop)
        return max(kept, part.spec.first_read(layer, self.reader))

    def cells(self, part: Part) -> int:
        """Number of (layer, token, head) cells of a part that are wanted."""
        layers = range(part.spec.num_layers)
        if not part.spec.windows:  # the short path: all layers are alike
            return len(layers) * len(part.heads) * (self.token_stop - self.first_wanted(part, 0))
        return len(part.heads) * sum(self.token_stop - self.first_wanted(part, layer) for layer in layers)


@dataclass(frozen=True)
class LeaseTotals:
    """Totals of what was scattered under a lease; `seconds` from its first arrival to the end of its last scatter."""

    number: int
    bytes: int
    segments: int
    seconds: float


@dataclass(frozen=True)
class ScatterDone:
    """The result of a finished scatter: it filled the lease, closed it, or neither."""

    filled: LeaseTotals | None = None
    closed: LeaseTotals | None = None


@dataclass
class _Lease:
    grant: LeaseGrant
    coverage: Coverage
    cells_missing: int
    group: int | None = None
    closing: bool = False
    scattering: int = 0
    bytes: int = 0
    segments: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    seen: set[tuple[int, int]] = field(default_factory=set)  # sender and number of scattered segments

    def totals(self) -> LeaseTotals:
        seconds = 0.0 if self.first_s is None else self.last_s - self.first_s
        return LeaseTotals(self.grant.number, self.bytes, self.segments, seconds)


class UsedNumbers:
    """The lease fields of the latest leases' numbers."""

    def __init__(self) -> None:
        self._fields: dict[int, None] = {}

    def add(self, number: int) -> None:
        """Adds a number. Raises InternalError if a recent lease has its lease field, because tags would be the same."""
        field_of_tag = lease_field(number)
        if field_of_tag in self._fields:
            raise InternalError(f"lease {number} has the lease field of a recent lease", field="number", value=number)
        self._fields[field_of_tag] = None
        if len(self._fields) > _USED_MAX:
            del self._fields[next(iter(self._fields))]

    def __contains__(self, field_of_tag: int) -> bool:
        return field_of_tag in self._fields


class LeaseTable:
    """All leases of one rank's cache in one incarnation.

    Args:
        parts: of the cache.
    """

    def __init__(self, parts: Sequence[Part], *, incarnation: int) -> None:
        self._parts = parts
        self._incarnation = incarnation
        self._leases: dict[int, _Lease] = {}  # by lease field
        self._used = UsedNumbers()

    def open(self, grant: LeaseGrant) -> LeaseTotals | None:
        """Opens a lease. Returns its totals if it covers no token and is filled already.

        Raises:
            InternalError: an open or recent lease has the number's lease field.
        """
        if lease_field(grant.number) in self._leases:
            raise InternalError(
                f"lease {grant.number} has the lease field of an open lease", field="number", value=grant.number
            )
        self._used.add(grant.number)
        cells = sum(map(grant.cells, self._parts))
        coverage = Coverage(self._parts[-1].layers.stop)
        lease = self._leases[lease_field(grant.number)] = _Lease(grant, coverage, cells)
        return lease.totals() if cells == 0 else None

    def arrival(
        self, tag: Tag, now_s: float, *, group: int | None = None, incarnation: int = 0
    ) -> SegmentRefusal | None:
        """The reason to refuse memory to a message with that tag; None if it may have memory.

        Claims nothing, because anybody may have sent the message.

        Args:
            group: shared by the ranks of one node, which number their segments separately; None: the sender is alone.
            incarnation: of the sender.
        """
        group = tag.sender if group is None else group
        lease = self._leases.get(tag.lease)
        if lease is None:
            return SegmentRefusal.LATE if tag.lease in self._used else SegmentRefusal.UNKNOWN_LEASE
        if lease.closing:
            return SegmentRefusal.LATE
        if lease.grant.prefill_incarnation not in (0, incarnation):
            return SegmentRefusal.FOREIGN_SENDER
        if lease.group not in (None, group):
            return SegmentRefusal.FOREIGN_SENDER
        if (tag.sender, tag.number) in lease.seen:
            return SegmentRefusal.DUPLICATE
        if lease.first_s is None:
            lease.first_s = lease.last_s = now_s
        return None

    def key(self, tag: Tag) -> bytes | None:
        """The key of the lease that the tag names. Returns None if that lease is not open."""
        lease = self._leases.get(tag.lease)
        return None if lease is None or lease.closing else lease.grant.key

    def filled_by(self, tag: Tag, *, group: int | None = None, incarnation: int = 0) -> int | None:
        """Number of the open lease that this sender fills or may begin to fill. Returns None if the tag names none."""
        lease = self._leases.get(tag.lease)
        if lease is None or lease.closing or lease.grant.prefill_incarnation not in (0, incarnation):
            return None
        return lease.grant.number if lease.group in (None, tag.sender if group is None else group) else None

    def start_scatter(
        self, tag: Tag, segment: Segment, *, group: int | None = None, has_draft: bool = True
    ) -> SegmentRefusal | None:
        """The reason not to scatter a received segment; None if it may be scattered, which claims its cells.

        The caller then scatters it and always calls `finish_scatter` afterwards. The first segment binds the lease to
        its sender's group.

        Args:
            has_draft: the sender has KV of layers that draft tokens, if this cache has. Otherwise the lease is filled
                without that.
        """
        group = tag.sender if group is None else group
        lease = self._leases.get(tag.lease)
        if lease is None or lease.closing:
            return SegmentRefusal.LATE
        if segment.incarnation != self._incarnation:
            return SegmentRefusal.STALE_INCARNATION
        if (segment.lease, segment.number) != (lease.grant.number, tag.number):
            return SegmentRefusal.MISLABELLED
        if lease.group not in (None, group):
            return SegmentRefusal.FOREIGN_SENDER
        if (tag.sender, tag.number) in lease.seen:
            return SegmentRefusal.DUPLICATE
        part = part_with(self._parts, range(segment.layer_start, segment.layer_stop))
        if part is None or (part.drafts and not has_draft) or not _within(lease.grant, part, segment):
            return SegmentRefusal.OUT_OF_RANGE
        if segment.payload_bytes != _payload_bytes(part, segment):
            return SegmentRefusal.WRONG_SIZE
        if not lease.coverage.claim(segment.layers, segment.token_start, segment.token_stop, segment.heads):
            return SegmentRefusal.OVERLAP
        if lease.group is None and not has_draft:
            lease.cells_missing -= sum(lease.grant.cells(part) for part in self._parts if part.drafts)
        lease.group = group
        lease.seen.add((tag.sender, tag.number))
        lease.scattering += 1
        return None

    def finish_scatter(self, segment: Segment, now_s: float) -> ScatterDone:
        """Counts a segment whose bytes are in the blocks."""
        lease = self._leases[lease_field(segment.lease)]
        lease.scattering -= 1
        lease.cells_missing -= segment.cells
        lease.bytes += segment.payload_bytes
        lease.segments += 1
        lease.last_s = now_s
        if not lease.closing:
            return ScatterDone(filled=lease.totals() if lease.cells_missing == 0 else None)
        return ScatterDone(closed=None if lease.scattering else self._forget(lease))

    def close(self, number: int) -> LeaseTotals | None:
        """Ends a lease. Returns its totals if its blocks may be freed now; otherwise `finish_scatter` will.

        Raises:
            UnknownLease: it is not open.
        """
        lease = self._leases.get(lease_field(number))
        if lease is None or lease.closing or lease.grant.number != number:
            raise UnknownLease(f"lease {number} is not open", field="number", value=number)
        lease.closing = True
        return None if lease.scattering else self._forget(lease)

    def bound_to(self, group: int) -> tuple[int, ...]:
        """The open leases that this group's senders have begun to fill."""
        return tuple(
            lease.grant.number for lease in self._leases.values() if lease.group == group and not lease.closing
        )

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    def _forget(self, lease: _Lease) -> LeaseTotals:
        del self._leases[lease_field(lease.grant.number)]
        return lease.totals()


def _within(grant: LeaseGrant, part: Part, segment: Segment) -> bool:
    if segment.layer_step < 1:
        return False
    # Without windows all layers are alike.
    layers = segment.layers if part.spec.windows else segment.layers[:1]
    return (
        segment.token_start < segment.token_stop <= grant.token_stop
        and part.heads.start <= segment.head_start < segment.head_stop <= part.heads.stop
        and all(grant.first_wanted(part, layer - part.layers.start) <= segment.token_start for layer in layers)
    )


def _payload_bytes(part: Part, segment: Segment) -> int:
    tokens = segment.token_stop - segment.token_start
    return payload_bytes(part.spec, layers=len(segment.layers), tokens=tokens, heads=len(segment.heads))
