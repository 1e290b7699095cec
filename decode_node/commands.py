"""Commands of a decode node's machine. Plain values; the shell executes them in order.

Engine commands except `Abort` are answered at once, before any other event. `Abort` and lease commands are answered
when they are done.
"""

from dataclasses import dataclass

from baton.core.types import TokenOutput
from baton.engine.request import EngineRequest
from baton.protos.internal.v1 import decode_pb2 as pb
from kvtransfer.leases import LeaseGrant


@dataclass(frozen=True)
class Send:
    """Send a message to a gateway; messages of one session arrive in order."""

    session: int
    message: pb.SessionResponse


@dataclass(frozen=True)
class EndSession:
    """End the stream once everything queued has been written."""

    session: int


@dataclass(frozen=True)
class Prefetch:
    """Read what stores have of a request's tokens into the cache. Answered by `Prefetched`, within a bound."""

    request: EngineRequest


@dataclass(frozen=True)
class Reserve:
    """Hold all blocks of a request. Answered by `Reserved` or `EngineRefused`.

    Args:
        arriving_tokens: only the tokens before this one come from a prefill node; 0: all do.
    """

    request: EngineRequest
    arriving_tokens: int = 0


@dataclass(frozen=True)
class ExtendReserved:
    """Extend a reservation by tokens that another node has produced. Answered by `Reserved` or `EngineRefused`."""

    engine_id: str
    output: tuple[int, ...]


@dataclass(frozen=True)
class PrefillHere:
    """Compute the rest of the reserved request here. Answered by `EngineRefused`, else only by tokens.

    Args:
        received_tokens: the KV of the tokens before this one has arrived in the request's blocks.
        has_draft: so has that of layers that draft tokens, if the model has such layers here.
    """

    engine_id: str
    output: tuple[int, ...]
    received_tokens: int = 0
    has_draft: bool = True


@dataclass(frozen=True)
class Admit:
    """All KV before `first` is in the reserved blocks: decode. Answered by `Admitted` or `EngineRefused`.

    Args:
        drafts: for the tokens after `first`.
        has_draft: the blocks also have the KV of layers that draft tokens, if the model has such layers here.
    """

    engine_id: str
    first: TokenOutput
    drafts: tuple[int, ...] = ()
    has_draft: bool = True


@dataclass(frozen=True)
class Abort:
    """End the request in the engine, in any state; unknown ids are allowed. Answered by `Aborted`."""

    engine_id: str


@dataclass(frozen=True)
class OpenLease:
    """Let one prefill node fill these blocks. Answered by `LeaseOpened` or `LeaseFailed`."""

    grant: LeaseGrant


@dataclass(frozen=True)
class CloseLease:
    """End a lease. Answered by `LeaseClosed` or `LeaseFailed`; only then may its blocks be used otherwise."""

    lease: int


@dataclass(frozen=True)
class SendLeaseEnded:
    """Notify all prefill nodes that this lease has ended, so that they stop computing and sending for it."""

    lease: int


Command = (
    Send
    | EndSession
    | Prefetch
    | Reserve
    | ExtendReserved
    | PrefillHere
    | Admit
    | Abort
    | OpenLease
    | CloseLease
    | SendLeaseEnded
)
