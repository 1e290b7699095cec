"""Events of one request's machine. Plain values.

`attempt` numbers the request's attempts on decode nodes and `call` its Prefill calls, both from 1. The machine ignores
events of earlier attempts and calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.errors import BatonError
from baton.protos.internal.v1 import decode_pb2, prefill_pb2

DecodeReply = (
    decode_pb2.Reserved
    | decode_pb2.Accepted
    | decode_pb2.Admitted
    | decode_pb2.HandOverFailed
    | decode_pb2.Failed
    | decode_pb2.Released
)


@dataclass(frozen=True)
class Started:
    """The first event: the request begins."""


class TokensCame(NamedTuple):
    """One or more tokens that the decode node has sampled, in order. An attempt's first token is always the first of an
    event, and a token with a finish reason is always the last.

    Args:
        came_at_s: arrival of the first of them; None: they have come just now.
    """

    attempt: int
    tokens: Sequence[decode_pb2.StepToken]
    came_at_s: float | None = None


class DecodeReplied(NamedTuple):
    """Any other message of the decode node about this request."""

    attempt: int
    message: DecodeReply


@dataclass(frozen=True)
class SessionLost:
    """The session with the decode node ended. The fleet marks the node as lost before the machine gets this."""

    attempt: int
    reason: str


@dataclass(frozen=True)
class PrefillReplied:
    """One event of a Prefill call."""

    call: int
    event: prefill_pb2.PrefillEvent


@dataclass(frozen=True)
class PrefillEnded:
    """A Prefill call has ended; `error` is None if its stream ended without one."""

    call: int
    error: BatonError | None


@dataclass(frozen=True)
class FleetChanged:
    """A node was added, removed, or reported something new. Sent only while the machine's `waits_for_fleet` is true."""


@dataclass(frozen=True)
class TimePassed:
    """The machine's `deadline_s` is reached."""


@dataclass(frozen=True)
class ClientCancelled:
    """The client cancelled, or the gateway ends the request with `error`."""

    error: BatonError


Event = (
    Started
    | TokensCame
    | DecodeReplied
    | SessionLost
    | PrefillReplied
    | PrefillEnded
    | FleetChanged
    | TimePassed
    | ClientCancelled
)
