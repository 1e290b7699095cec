"""Commands of a prefill node's machine. Plain values; the shell executes them in order."""

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.engine.request import EngineRequest
from baton.protos.internal.v1 import decode_pb2
from baton.protos.internal.v1 import prefill_pb2 as pb
from kvtransfer.records import SendJob


@dataclass(frozen=True)
class Prefetch:
    """Load the prompt's KV from stores into the cache, as far as they have it. Answered by `Prefetched`, within a
    bound."""

    call: int
    request: EngineRequest


@dataclass(frozen=True)
class Submit:
    """Compute this prompt. Answered at once by `EngineRefused`, or else only by steps."""

    request: EngineRequest


@dataclass(frozen=True)
class Abort:
    """End the request in the engine and free its blocks. Answered by `Aborted`."""

    call: int


@dataclass(frozen=True)
class SendKV:
    """Send one job; the machine has at most one per call under way. Answered by `Sent` or `SendFailed`."""

    call: int
    job: SendJob


@dataclass(frozen=True)
class StopSending:
    """End all queued and running sends of a lease. Answered by `BecameQuiet` or `StopFailed`; a job under way is
    answered before that, or never."""

    call: int
    peer: int
    lease: int


@dataclass(frozen=True)
class SendToPeer:
    """Send a message on the Pair stream; it is dropped if the peer is gone."""

    peer: int
    message: decode_pb2.PairRequest


@dataclass(frozen=True)
class Respond:
    """Send an event on the call's stream to the gateway. Events are written in order."""

    call: int
    event: pb.PrefillEvent


@dataclass(frozen=True)
class EndCall:
    """End the call's stream. `error` None: everything has been sent, and the stream ends after all responses; else
    responses that are not written yet are dropped."""

    call: int
    error: BatonError | None


Command = Prefetch | Submit | Abort | SendKV | StopSending | SendToPeer | Respond | EndCall
