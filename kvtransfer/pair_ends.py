"""One node's ends of a pair's links: the rank, the number and the KV of each.

`kvtransfer.flows` defines the links of a pair of nodes. Both nodes number them alike: the pair's own number plus the
other node's rank. A node of one rank is the simplest case.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtransfer.flows import Flow, RankPair, common
from kvtransfer.rank_transfer import RankTransfer
from kvtransfer.records import SendJob

# Distance between the numbers that a sender gives to its pairs: room for the ranks of each peer.
MOST_RANKS = 64


@dataclass(frozen=True)
class PairEnd:
    """This node's end of one link of a pair."""

    link: RankPair
    flows: tuple[Flow, ...]
    rank: RankTransfer
    number: int


def ends_of(
    pair: int, links: Mapping[RankPair, tuple[Flow, ...]], ranks: Sequence[RankTransfer], *, sends: bool
) -> Iterator[PairEnd]:
    """The ends at the node with these ranks, which is the pair's sender or its receiver."""
    for link, flows in links.items():
        ours, theirs = link.sender_rank, link.receiver_rank
        if not sends:
            ours, theirs = theirs, ours
        yield PairEnd(link, flows, ranks[ours], pair + theirs)


def takes_part(job: SendJob, link: RankPair) -> bool:
    """Whether both ranks of a link have the job's request."""
    return job.owner in (None, link.sender_rank) and job.owner_there in (None, link.receiver_rank)


def part_of(job: SendJob, end: PairEnd) -> SendJob | None:
    """The part of a job that one link carries; None if there is none."""
    if job.layers is not None and not any(common(flow.layers, job.layers) for flow in end.flows):
        return None
    return replace(job, peer=end.number, sender_number=job.sender_number + end.link.sender_rank, flows=end.flows)


def rounds_of(ends: Sequence[PairEnd]) -> list[list[PairEnd]]:
    """The links in as few groups as possible; within a group no two links share a rank."""
    turns = 1 + max(max(end.link.sender_rank, end.link.receiver_rank) for end in ends)
    groups: dict[int, list[PairEnd]] = {}
    for end in ends:
        groups.setdefault((end.link.receiver_rank - end.link.sender_rank) % turns, []).append(end)
    return list(groups.values())


def lanes_of(ends: Sequence[PairEnd]) -> int:
    """Number of links that can be in use at once without sharing a rank."""
    return min(len({end.link.sender_rank for end in ends}), len({end.link.receiver_rank for end in ends}))
