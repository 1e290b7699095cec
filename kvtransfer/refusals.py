"""The reasons for which a receiver refuses a message, and the error that each one becomes. Pure; no torch."""

from enum import StrEnum

from baton.core.errors import BatonError, DataLoss, UnknownLease
from kvtransfer.segments import WARM_UP, Tag


class SegmentRefusal(StrEnum):
    """The reason why a message was not scattered."""

    LATE = "its lease has ended"
    UNKNOWN_SENDER = "its sender number belongs to another peer"
    UNKNOWN_LEASE = "no such lease was granted"
    FOREIGN_SENDER = "another sender fills that lease"
    UNEXPECTED = "its peer has sent all of its warm-up already"
    DUPLICATE = "that segment has arrived before"
    TOO_LARGE = "it is larger than a staging slot"
    MALFORMED = "it has no readable trailer"
    WRONG_SIZE = "its payload's size does not match its ranges"
    DIGEST = "its digest does not match"
    SEAL = "its seal was not made with its lease's key"
    MISLABELLED = "tag and trailer name different segments"
    STALE_INCARNATION = "its lease is of another incarnation of this node"
    OUT_OF_RANGE = "it holds more than the lease covers"
    OVERLAP = "some of its tokens have arrived before"
    BROKEN = "the transport failed before it was complete"


# The message names a lease, sender or range that is not its own. For all other reasons its bytes are lost.
_WRONG_REFERENCE = frozenset(
    {
        SegmentRefusal.UNKNOWN_LEASE,
        SegmentRefusal.UNKNOWN_SENDER,
        SegmentRefusal.FOREIGN_SENDER,
        SegmentRefusal.SEAL,
        SegmentRefusal.MISLABELLED,
        SegmentRefusal.STALE_INCARNATION,
        SegmentRefusal.OUT_OF_RANGE,
    }
)


def refusal_error(tag: Tag, refusal: SegmentRefusal) -> BatonError:
    """The error for a refused message with that tag."""
    what = "a warm-up message" if tag.number == WARM_UP else f"segment {tag.number} of lease ..{tag.lease}"
    message = f"{what} from sender {tag.sender} was refused: {refusal}"
    if refusal in _WRONG_REFERENCE:
        return UnknownLease(message, field="lease", value=tag.lease)
    return DataLoss(message, field="segment", value=tag.number)
