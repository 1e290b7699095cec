"""Events of a prefill node's machine. Plain values.

`call` is this node's number for one Prefill call, and names its request in the engine as `str(call)`; requests of the
Decode service have a dot in their names. `peer` is this node's number for one decode node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import NOTHING_LOADED, LoadedTokens
from baton.engine.events import StepEvents
from baton.protos.internal.v1 import prefill_pb2 as pb
from kvtransfer.segments import Segment


@dataclass(frozen=True)
class PeerFacts:
    """Facts from the handshake with the decode node that a ticket names.

    Attributes:
        number: this node's number for the peer.
        sender_number: the peer's number for this node.
        kv_converted: how KV is converted, such as "bfloat16 to fp8"; empty if it is not.
        max_context_tokens: of the decode node; None: unknown.
        has_draft: it accepts KV of layers that draft tokens, if this node has such layers.
    """

    number: int
    sender_number: int
    transport: str
    kv_converted: str
    max_context_tokens: int | None
    has_draft: bool = True


@dataclass(frozen=True)
class Called:
    """A gateway wants a prompt prefilled for a ticket. The decode node is connected.

    Attributes:
        layers_per_group: number of layers whose KV is sent together while a chunk computes; with all layers, a chunk is
            sent whole.
    """

    call: int
    request: pb.PrefillRequest
    peer: PeerFacts
    layers_per_group: int


@dataclass(frozen=True)
class CallCancelled:
    """The gateway has cancelled the call, or is gone."""

    call: int


@dataclass(frozen=True)
class Prefetched:
    """Answers `Prefetch`. The cache has these tokens now, too."""

    call: int
    loaded: LoadedTokens = NOTHING_LOADED


@dataclass(frozen=True)
class EngineRefused:
    """Answers `Submit`: the engine raised this error."""

    call: int
    error: BatonError


@dataclass(frozen=True)
class StepDone:
    """The results of one engine step, or of its first layers."""

    events: StepEvents


@dataclass(frozen=True)
class Sent:
    """Answers `SendKV`: all segments of the job are complete at the transport."""

    call: int
    segments: Sequence[Segment]


@dataclass(frozen=True)
class SendFailed:
    """Answers `SendKV`: the job failed, and nothing of it is in flight."""

    call: int
    error: BatonError


@dataclass(frozen=True)
class BecameQuiet:
    """Answers `StopSending`: nothing of the lease is in flight and nothing reads its blocks."""

    call: int


@dataclass(frozen=True)
class StopFailed:
    """Answers `StopSending`: the transfer has ended, and whether anything is still in flight is unknown."""

    call: int
    error: BatonError


@dataclass(frozen=True)
class Aborted:
    """Answers `Abort`: the engine holds nothing for the request any more."""

    call: int


@dataclass(frozen=True)
class LeaseEnded:
    """The decode node has ended the lease."""

    peer: int
    lease: int


@dataclass(frozen=True)
class PeerLost:
    """The connection to a decode node is gone."""

    peer: int
    error: BatonError


@dataclass(frozen=True)
class DrainStarted:
    """New calls are refused from now on; running calls continue."""


@dataclass(frozen=True)
class Closing:
    """The process is exiting: running calls fail, so that gateways retry them on other nodes."""


Event = (
    Called
    | CallCancelled
    | Prefetched
    | EngineRefused
    | StepDone
    | Sent
    | SendFailed
    | BecameQuiet
    | StopFailed
    | Aborted
    | LeaseEnded
    | PeerLost
    | DrainStarted
    | Closing
)
