"""What goes between the asyncio side and the transfer thread: plain records, and the counters that both see.

Knows nothing of how either side works.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.errors import BatonError
from kvcache.wire.conversion import Converter
from kvtransfer.leases import Refusal
from kvtransfer.link import LinkSpeed, choose_payload_bytes


@dataclass(frozen=True)
class SendJob:
    """KV of one request's tokens [token_start, token_stop) for one lease of a peer: what of it token `resume_at` or a
    later one reads. One rank sends it to one rank, or a node to a node, whose links then carry a part of it each.

    Attributes:
        peer: this node's number for the receiver.
        sender_number: the receiver's number for this node.
        incarnation: the receiver's, that gave the lease.
        first_segment: number of the job's first segment: that of the lease's segments sent before.
        block_ids: of the whole request in this node's cache; must stay as they are until the job has ended. On a GPU
            the step that computed the tokens must be over, and not only queued: gathers know nothing of its stream.
        layers: those to send; all if not given.
        heads: of the kv heads, by the model's numbers, those to send; all that the cache has if not given.
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
    heads: range | None = None


@dataclass(frozen=True)
class SegmentRefused:
    """A message that was not scattered. `lease` and `sender` are what its tag says, true or not."""

    lease: int
    sender: int
    refusal: Refusal
    error: BatonError


@dataclass(frozen=True)
class WarmUp:
    """What a sender sent to warm a link up."""

    messages: int
    bytes: int


@dataclass(frozen=True)
class LinkMeasure:
    """A warm link: what carries the bytes, and what it was measured to do, as `LinkSpeed` has it."""

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
class TransferCounters:
    """How things stand. `refused` counts what must not happen; `late` what ended leases and lost peers explain.

    Attributes:
        converted: segments that this node sent in another dtype than that of its cache.
    """

    refusals: Mapping[Refusal, int]
    peers: Mapping[int, PeerTraffic]
    converted: int = 0

    @property
    def refused(self) -> int:
        return sum(count for refusal, count in self.refusals.items() if refusal is not Refusal.LATE)

    @property
    def late(self) -> int:
        return self.refusals.get(Refusal.LATE, 0)


@dataclass(frozen=True)
class Peer:
    """A connected peer as the thread knows it.

    Attributes:
        group: what the ranks of one node have in common; None for a peer that is alone.
        payload_limit: what one message to it may carry.
        carrier: what moves the bytes between the two; empty until it is connected.
        through_host: whether the cache is on a GPU and what it exchanges with this peer goes through host memory.
        link: what was measured when the pair was made; None until then.
        converter: what the cache's numbers become for this peer; None: they stay.
    """

    number: int
    payload_limit: int
    carrier: str = ""
    through_host: bool = False
    link: LinkSpeed | None = None
    group: int | None = None
    converter: Converter | None = None

    def payload_bytes_for(self, job_bytes: int, *, handling_s: float) -> int:
        """What one message of a job of that size should carry at most."""
        if self.link is None:
            return self.payload_limit
        return choose_payload_bytes(self.link, job_bytes=job_bytes, limit=self.payload_limit, handling_s=handling_s)

    @property
    def transport(self) -> str:
        """What carries the bytes, in words for operators."""
        return f"{self.carrier} through host memory" if self.through_host else self.carrier


@dataclass
class Ledger:
    """The thread's own counters and connected peers. Written by the thread alone; `snapshot` may be called anywhere."""

    peers: dict[int, Peer] = field(default_factory=dict)
    refusals: Counter[Refusal] = field(default_factory=Counter)
    traffic: dict[int, PeerTraffic] = field(default_factory=dict)
    converted: int = 0

    def moved(self, peer: int, num_bytes: int) -> None:
        before = self.traffic.get(peer)
        if before is not None:
            self.traffic[peer] = PeerTraffic(before.bytes_total + num_bytes, before.segments_total + 1)
            self.converted += self.peers[peer].converter is not None

    def fair_share(self, slots: int) -> int:
        """How many staging slots one peer may hold, so that one that stalls leaves room for the others."""
        return slots if len(self.peers) <= 1 else max(1, slots // 2)

    def snapshot(self) -> TransferCounters:
        return TransferCounters(self.refusals.copy(), self.traffic.copy(), self.converted)
