"""What the machine of one request reacts to. Plain values.

`attempt` numbers the request's stays on decode nodes, `call` its Prefill calls, both from 1. An event about an earlier
attempt or call than the present one is ignored.
"""

from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import BatonError
from protos.baton.v1 import decode_pb2, prefill_pb2

DecodeReply = (
    decode_pb2.StepToken
    | decode_pb2.Reserved
    | decode_pb2.Accepted
    | decode_pb2.Admitted
    | decode_pb2.HandOverFailed
    | decode_pb2.Failed
    | decode_pb2.Released
)


@dataclass(frozen=True)
class Started:
    """Begin. The first event."""


class DecodeReplied(NamedTuple):
    """The decode node's message about this request. One for each token, and a tuple is made in half the time."""

    attempt: int
    message: DecodeReply


@dataclass(frozen=True)
class SessionLost:
    """The session with the decode node is gone. The fleet knows the node as lost before the machine gets this."""

    attempt: int
    reason: str


@dataclass(frozen=True)
class PrefillReplied:
    """One event of a Prefill call."""

    call: int
    event: prefill_pb2.PrefillEvent


@dataclass(frozen=True)
class PrefillEnded:
    """A Prefill call is over; `error` None: its stream ended without one."""

    call: int
    error: BatonError | None


@dataclass(frozen=True)
class FleetChanged:
    """A node came, went, or reported something new. Only sent while the machine's `waits_for_fleet` is true."""


@dataclass(frozen=True)
class TimePassed:
    """The machine's `deadline_s` has come."""


@dataclass(frozen=True)
class Cancelled:
    """The client cancelled, or the gateway ends the request with `error`."""

    error: BatonError


Event = Started | DecodeReplied | SessionLost | PrefillReplied | PrefillEnded | FleetChanged | TimePassed | Cancelled
