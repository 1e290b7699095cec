"""Events of a decode node's machine. Plain values.

`session` is this node's number for one gateway's Session stream, `peer` the sender number of one prefill node's Pair
stream, `engine_id` the name of one request in this node's engine.
"""

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import NOTHING_LOADED, FinishReason, LoadedTokens
from baton.engine.events import StepEvents
from baton.engine.request import Reservation
from baton.protos.internal.v1 import decode_pb2 as pb
from kvtransfer.leases import LeaseTotals


@dataclass(frozen=True)
class SessionOpened:
    session: int


@dataclass(frozen=True)
class SessionMessage:
    """A gateway's message."""

    session: int
    message: pb.SessionRequest


@dataclass(frozen=True)
class SessionClosed:
    """The gateway is gone, or the stream broke: all its requests end."""

    session: int


@dataclass(frozen=True)
class HandOverReceived:
    """A prefill node of that incarnation reports that it has computed all KV of a lease.

    Args:
        has_draft: KV of layers that draft tokens comes too, if this node has such layers.
    """

    peer: int
    message: pb.HandOver
    incarnation: int = 0
    has_draft: bool = True


@dataclass(frozen=True)
class QuietReceived:
    """A prefill node of that incarnation reports that it sends nothing more for a lease."""

    peer: int
    message: pb.Quiet
    incarnation: int = 0


@dataclass(frozen=True)
class PeerLost:
    """A prefill node's Pair stream ended and its endpoints are closed; it had begun to fill `leases`."""

    peer: int
    name: str
    leases: tuple[int, ...]


@dataclass(frozen=True)
class Prefetched:
    """Answers `Prefetch`. The cache has these tokens now, too."""

    engine_id: str
    loaded: LoadedTokens = NOTHING_LOADED


@dataclass(frozen=True)
class Reserved:
    """Answers `Reserve` and `ExtendReserved`: the engine holds these blocks."""

    engine_id: str
    reservation: Reservation


@dataclass(frozen=True)
class EngineRefused:
    """Answers `Reserve`, `ExtendReserved`, `Admit` or `PrefillHere`: the engine raised this error."""

    engine_id: str
    error: BatonError


@dataclass(frozen=True)
class Admitted:
    """Answers `Admit`; `finish_reason` is set when the first token was also the last one."""

    engine_id: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Aborted:
    """Answers `Abort`: the engine holds nothing for the request any more."""

    engine_id: str


@dataclass(frozen=True)
class StepDone:
    """One engine step's tokens and failures."""

    events: StepEvents


@dataclass(frozen=True)
class LeaseOpened:
    """Answers `OpenLease`: every rank accepts KV for it."""

    lease: int


@dataclass(frozen=True)
class LeaseFilled:
    """Every byte of the lease lies in its blocks."""

    totals: LeaseTotals


@dataclass(frozen=True)
class LeaseClosed:
    """Answers `CloseLease`: nothing is written to its blocks any more."""

    totals: LeaseTotals


@dataclass(frozen=True)
class LeaseFailed:
    """Answers `OpenLease` or `CloseLease` when the transfer raised.

    A lease that failed to open may be open on some ranks, so it must be closed. A lease that failed to close is over.
    """

    lease: int
    error: BatonError


@dataclass(frozen=True)
class SegmentRefused:
    """A segment of the lease was not scattered, so the lease can no longer become complete."""

    lease: int
    error: BatonError


@dataclass(frozen=True)
class RoomFreed:
    """Blocks were freed that no request of the machine held: copies between the cache and stores have ended or, on a
    prefill node that also decodes, a call of its Prefill service."""


@dataclass(frozen=True)
class TimePassed:
    """The machine's `deadline_s` is reached."""


@dataclass(frozen=True)
class DrainStarted:
    """New requests are refused from now on; running requests go on."""


@dataclass(frozen=True)
class Closing:
    """The process ends. Every live request ends with `Released` alone, and its gateway continues it elsewhere."""


Event = (
    SessionOpened
    | SessionMessage
    | SessionClosed
    | HandOverReceived
    | QuietReceived
    | PeerLost
    | Prefetched
    | Reserved
    | EngineRefused
    | Admitted
    | Aborted
    | StepDone
    | LeaseOpened
    | LeaseFilled
    | LeaseClosed
    | LeaseFailed
    | SegmentRefused
    | RoomFreed
    | TimePassed
    | DrainStarted
    | Closing
)
