"""Records that the event loop and the transfer thread exchange. Needs no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from baton.core.errors import BatonError
from baton.core.kv_entries import EntryKey
from kvtransfer.flows import Flow
from kvtransfer.link import LinkSpeed
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.stores.store import StoreCounters


@dataclass(frozen=True)
class SendJob:
    """KV of one request's tokens [token_start, token_stop) for one lease of a peer.

    A job is for one link between two ranks, or for a pair of nodes, which divides it among its links.

    Attributes:
        peer: this node's number for the receiver.
        sender_number: the receiver's number for this node.
        incarnation: of the receiver that granted the lease.
        first_segment: number of the job's first segment, which is the count of segments sent for the lease before.
        resume_at: first position that may still be computed. KV older than the sliding window is not sent.
        block_ids: the whole request's blocks in this node's cache; they must not change until the job has ended. On a
            GPU the step that computed the tokens must be over, not only queued: gathers are not ordered after its
            stream.
        layers: layers to send, numbered over all parts; None: all, those of the state only if there is a slot.
        flows: what the link carries; empty: everything that the cache has.
        key: of the lease, for a peer that wants seals.
        state_slot: where the recurrent state after `token_stop` tokens is; it must not change either. -1: the state is
            not sent with this job, because it is sent with the lease's last one.
        owner: the rank that has the blocks and alone sends; None: every rank sends its share.
        owner_there: the receiver's rank that owns the lease and alone receives; None: every rank receives its share.
    """

    peer: int
    sender_number: int
    lease: int
    incarnation: int
    first_segment: int
    token_start: int
    token_stop: int
    resume_at: int
    block_ids: tuple[int, ...]
    layers: range | None = None
    flows: tuple[Flow, ...] = ()
    key: bytes = field(default=b"", repr=False)
    state_slot: int = -1
    owner: int | None = None
    owner_there: int | None = None


@dataclass(frozen=True)
class EntryLink:
    """A link for pulls, as the rank at one of its ends sees it.

    Attributes:
        peer: this rank's number for the other one.
        flows: what the link carries of an entry; empty: all of it, because both ranks keep the same.
    """

    peer: int
    flows: tuple[Flow, ...] = ()


@dataclass(frozen=True)
class PullJob:
    """The KV that one pull brings from one node to another: consecutive entries of a sequence, a recurrent state, or
    both. Wherever entries are counted, the state counts as one more, after the last entry.

    Attributes:
        number: of 40 bits; unknown to everybody but the two nodes.
        state_after: the last entry that the state includes; None: no state is wanted.
    """

    number: int
    keys: tuple[EntryKey, ...]
    state_after: EntryKey | None = None

    def __len__(self) -> int:
        return len(self.keys) + (self.state_after is not None)

    @property
    def root(self) -> bytes:
        return self.keys[0].root if self.state_after is None else self.state_after.root


@dataclass(frozen=True)
class RefusedSegment:
    """A message that was not scattered.

    Attributes:
        lease: the lease that its sender fills and that can no longer become complete; None: no lease fails.
        sender: the peer whose link it came over.
    """

    lease: int | None
    sender: int
    refusal: SegmentRefusal
    error: BatonError


@dataclass(frozen=True)
class WarmUp:
    """The warm-up traffic that a sender sent over a link."""

    messages: int
    bytes: int


@dataclass(frozen=True)
class LinkMeasure:
    """A measured link. `transport` names the carrier of the bytes; times are those of `LinkSpeed`."""

    transport: str
    gigabytes_per_s: float
    latency_s: float = 0.0
    message_cost_s: float = 0.0

    @property
    def speed(self) -> LinkSpeed:
        return LinkSpeed(self.latency_s, self.message_cost_s, self.gigabytes_per_s * 1e9)


@dataclass(frozen=True)
class PeerTraffic:
    """Payload exchanged with one peer, either way."""

    bytes_total: int = 0
    segments_total: int = 0


@dataclass(frozen=True)
class EntryCounters:
    """Totals of the entries that ranks keep outside of their caches.

    Attributes:
        entries, bytes: in host memory now.
        saved: entries that were copied to host memory.
        loaded: entries that were copied to the cache, by where they were: `host`, or a store's name.
        evicted: entries that left host memory for others.
        damaged: entries that a load refused, because their bytes or names were wrong.
        failed: entries for which a save found no room, and those that ended a load because no store had them in time.
        not_written: entries that were not written behind, because a store had too many writes before them.
        stores: the totals of each store below host memory, by its name.
        damaged_from: the damaged entries, by where they were, as `loaded`.
        served: entries that were sent to other nodes.
        not_read: loads that ended before an entry, because its store was slower lately than computing.
    """

    entries: int = 0
    bytes: int = 0
    saved: int = 0
    loaded: Mapping[str, int] = field(default_factory=dict)
    evicted: int = 0
    damaged: int = 0
    failed: int = 0
    not_written: int = 0
    stores: Mapping[str, StoreCounters] = field(default_factory=dict)
    damaged_from: Mapping[str, int] = field(default_factory=dict)
    served: int = 0
    not_read: int = 0

    @classmethod
    def of_ranks(cls, counters: Sequence[Self]) -> Self:
        """The totals of several ranks together."""
        if len(counters) == 1:  # a status is read ten times a second
            return counters[0]
        loaded, damaged = Counter[str](), Counter[str]()
        for each in counters:
            loaded.update(each.loaded)
            damaged.update(each.damaged_from)
        names = dict.fromkeys(name for each in counters for name in each.stores)
        return cls(
            loaded=loaded,
            damaged_from=damaged,
            stores={name: StoreCounters(**_summed(StoreCounters, _of_store(counters, name))) for name in names},
            **_summed(cls, counters),
        )


@dataclass(frozen=True)
class TransferCounters:
    """Totals of a transfer. `refused` counts invalid messages, `late` counts messages of ended leases.

    Attributes:
        peers: traffic with the peers that are connected now.
        converted: segments that this node sent in another dtype than its cache's.
        bytes_total, segments_total: payload exchanged with all peers so far.
        entries: what is kept outside of the cache.
    """

    refusals: Mapping[SegmentRefusal, int]
    peers: Mapping[int, PeerTraffic]
    converted: int = 0
    bytes_total: int = 0
    segments_total: int = 0
    entries: EntryCounters = EntryCounters()

    @property
    def refused(self) -> int:
        return sum(count for refusal, count in self.refusals.items() if refusal is not SegmentRefusal.LATE)

    @property
    def late(self) -> int:
        return self.refusals.get(SegmentRefusal.LATE, 0)


def _of_store(counters: Sequence[EntryCounters], name: str) -> list[StoreCounters]:
    return [each.stores[name] for each in counters if name in each.stores]


def _summed(kind: type, counters: Iterable[object]) -> dict[str, Any]:
    """The sums of all numbers of records of one kind."""
    counters = list(counters)
    names = [each.name for each in fields(kind) if each.type in (int, "int", float, "float")]
    return {name: sum(getattr(each, name) for each in counters) for name in names}
