"""Events of one open lease: from prefill nodes, the transfer, and the gateway. Plain values."""

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import TokenOutput
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.convert import token_from_proto

# More drafts than any node makes; the rest of a peer's list is not looked at.
_DRAFTS_MAX = 16


@dataclass(frozen=True)
class HandedOver:
    """The prefill node has computed all KV of the lease. Some of it may still be on its way.

    Attributes:
        first: the first token; None if the ticket was for the first part of a split prompt.
        finished: the first token was also the last one, so no KV is needed.
        sampled_ago_s: how long ago the first token was sampled, or the first part was computed.
        drafts: of the prefill node for the tokens after the first.
        has_draft: KV of layers that draft tokens comes too, if this node has such layers.
    """

    lease: int
    first: TokenOutput | None
    finished: bool
    sampled_ago_s: float
    drafts: tuple[int, ...] = ()
    has_draft: bool = True


@dataclass(frozen=True)
class Filled:
    """All KV of the lease is in its blocks."""

    lease: int


@dataclass(frozen=True)
class LeaseLost:
    """KV of the lease was refused, or its sender is gone."""

    lease: int
    error: BatonError


@dataclass(frozen=True)
class Renewal:
    """The gateway wants a new lease in place of this one; `output` is all tokens generated so far.

    Attributes:
        prefill_incarnation: of the node that gets the new ticket; 0 if unknown.
    """

    lease: int
    output: tuple[int, ...]
    prefill_incarnation: int = 0


@dataclass(frozen=True)
class LocalPrefill:
    """The gateway wants the prompt prefilled here; `output` is all tokens generated so far."""

    lease: int
    output: tuple[int, ...]


LeaseEvent = HandedOver | Filled | LeaseLost | Renewal | LocalPrefill


def handed_over(message: pb.HandOver, *, has_draft: bool = True) -> HandedOver:
    """A prefill node's message as an event of its lease."""
    return HandedOver(
        lease=message.lease,
        first=token_from_proto(message.first_token) if message.HasField("first_token") else None,
        finished=message.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED,
        sampled_ago_s=message.sampled_ago_s,
        drafts=tuple(message.guesses[:_DRAFTS_MAX]),
        has_draft=has_draft,
    )
