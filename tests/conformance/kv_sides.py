"""A receiver's state for one peer, as numbers, and everything that may happen between two steps of the receiver. Pure.

The receiver's own reaction is found by running it.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

# The stage of a message with a slot. Even: an operation on the slot runs. Odd: it is done, and the receiver has not
# noticed yet.
RECEIVING, RECEIVED, CANCELLING, CANCELLED, READING, READ, SCATTERING, SCATTERED = range(8)
# The content of a slot or block to which no message was written.
JUNK = 0


class Entry(NamedTuple):
    """An open lease as the lease table has it."""

    is_bound: bool
    closing: bool
    scattering: int
    cells_missing: int
    seen: tuple[int, ...]
    claims: tuple[tuple[int, ...], ...]


class Side(NamedTuple):
    """A peer, and the lease that it fills. Messages are numbered from 1 and have one token each.

    Attributes:
        is_there: the link was not lost.
        sent: messages that the peer has sent.
        queue: the sent messages that the receiver has not taken.
        held: slots that the receiver counts for the peer.
        is_called: the owner has closed the lease.
        is_over: the owner was notified that the lease's blocks are free.
        is_filled: the owner was notified that the lease is filled.
        has_blocks, has_owner: whether the receiver still has the lease's blocks, and an owner to notify of its end.
        blocks: what each of the lease's blocks holds.
        entry: None when the lease is over.
        under_way: messages with a slot, and their stages. Their order is not kept: every order is tried.
    """

    is_there: bool
    sent: int
    queue: tuple[int, ...]
    held: int
    is_called: bool
    is_over: bool
    is_filled: bool
    has_blocks: bool
    has_owner: bool
    blocks: tuple[int, ...]
    entry: Entry | None
    under_way: tuple[tuple[int, int], ...]


class Choice(NamedTuple):
    """The events of one side before the receiver's next step.

    Attributes:
        events: in words.
        repeats: messages sent twice.
    """

    side: Side
    events: str
    repeats: int


@cache
def choices(side: Side, repeats: int) -> tuple[Choice, ...]:
    """All sets of events that are possible before the receiver's next step, from none to all.

    Ends of operations and arrivals do not depend on each other, so only their set counts, and not their order. They
    also do not depend on calls, apart from `lost`, which is tried with every state of the peer's receives.
    """
    found = []
    ends = [(stage, stage + 1) if stage % 2 == 0 else (stage,) for _, stage in side.under_way]
    for stages in product(*ends):
        ended = [
            (number, after) for (number, before), after in zip(side.under_way, stages, strict=True) if before != after
        ]
        blocks = list(side.blocks)
        for number, stage in ended:
            if stage == SCATTERED:
                assert not side.is_over, "I3: written to after its lease was over"
                assert blocks[number - 1] == JUNK, "I3: written to twice"
                blocks[number - 1] = number
        under_way = tuple(sorted(zip([number for number, _ in side.under_way], stages, strict=True)))
        for sent, arrivals in _arrivals(side, repeats):
            after_all = side._replace(sent=sent, queue=side.queue + arrivals, blocks=tuple(blocks), under_way=under_way)
            events = [f"end {number}" for number, _ in ended] + [f"arrive {number}" for number in arrivals]
            found.append(Choice(after_all, ", ".join(events), len(arrivals) - (sent - side.sent)))
    return tuple(found)


def _arrivals(side: Side, repeats: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers of sent messages, and the messages that arrive: the next ones in order, and any sent before once more."""
    if not side.is_there:
        yield side.sent, ()
        return
    rows: list[tuple[int, tuple[int, ...]]] = [(side.sent, ())]
    while rows:
        sent, row = rows.pop()
        yield sent, row
        if sent < len(side.blocks):
            rows.append((sent + 1, (*row, sent + 1)))
        if len(row) - (sent - side.sent) < repeats:
            rows += [(sent, (*row, number)) for number in range(1, sent + 1)]


@cache
def before_loss(side: Side) -> tuple[Side, ...]:
    """The receives that may be done when a peer's link is cut; the others are cancelled."""
    ends = [(RECEIVED, RECEIVING) if stage == RECEIVING else (stage,) for _, stage in side.under_way]
    numbers = [number for number, _ in side.under_way]
    return tuple(side._replace(under_way=tuple(sorted(zip(numbers, stages, strict=True)))) for stages in product(*ends))


def can_go_on(side: Side) -> bool:
    """Whether anything of it is in flight or can still arrive."""
    return bool(side.under_way or side.queue) or (side.is_there and side.sent < len(side.blocks))
