"""A node's leases over all its ranks: open on every rank, and filled once every rank has its share.

A lease with an owner is open only on that rank.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton.core.errors import BatonError, UnknownLease
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.rank_transfer import OnFilled, OnRefused, RankTransfer, all_done
from kvtransfer.records import RefusedSegment


@dataclass
class _Lease:
    """What the ranks of a lease have reported about it so far."""

    ranks: Sequence[RankTransfer]
    opening: "asyncio.Future[list[None]]"
    filled: list[LeaseTotals] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        return len(self.filled) == len(self.ranks)


class RankedLeases:
    """The verbs of `RankTransfer` for leases; docs here say only what differs. Belongs to its transfer's event loop.

    Args:
        ranks: of the node; its transfer adds them before it starts.
    """

    def __init__(self, ranks: Sequence[RankTransfer]) -> None:
        self._ranks = ranks
        self._on_filled: OnFilled | None = None
        self._on_refused: OnRefused | None = None
        self._leases: dict[int, _Lease] = {}
        self._forgetting: set[asyncio.Task[None]] = set()  # leases that are closed for this node, but not on every rank

    def deliver_to(self, on_filled: OnFilled, on_refused: OnRefused) -> None:
        """Sets the callbacks for lease events; call it before the transfer starts. A lease is filled once every rank
        has its tokens, and the totals are those of all ranks together."""
        self._on_filled, self._on_refused = on_filled, on_refused

    @property
    def are_delivered(self) -> bool:
        """Whether lease events have their callbacks."""
        return self._on_filled is not None

    def open_lease(self, lease: LeaseGrant) -> "asyncio.Future[list[None]]":
        """The future is done when the lease is open on every rank, or on its owner. Only then may the ticket be given
        out."""
        ranks = self._ranks if lease.owner is None else [self._ranks[lease.owner]]
        # This process's rank comes first: it refuses a wrong lease before any other rank opens it.
        opening = asyncio.gather(*(rank.open_lease(lease) for rank in ranks))
        self._leases[lease.number] = _Lease(ranks, opening)
        return asyncio.shield(opening)

    async def close_lease(self, number: int) -> LeaseTotals:
        lease = self._leases.pop(number, None)
        if lease is None:
            raise UnknownLease(f"lease {number} is not open", field="number", value=number)
        await asyncio.wait([lease.opening])
        return _sum_totals(await all_done(rank.close_lease(number) for rank in lease.ranks))

    def close_filled(self, number: int) -> LeaseTotals | None:
        """Ends a lease whose tokens have all arrived at every rank. No token is written twice, so nothing writes to its
        blocks any more, and this waits for no rank. Returns None and changes nothing if tokens are missing."""
        lease = self._leases.get(number)
        if lease is None or not lease.is_filled:
            return None
        del self._leases[number]
        task = asyncio.create_task(_forget(number, lease), name=f"forget-lease-{number}")
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)
        return _sum_totals(lease.filled)

    async def forget_all(self) -> None:
        """Forgets all leases, because the node becomes another incarnation."""
        self._leases.clear()
        await self.all_forgotten()

    async def all_forgotten(self) -> None:
        """Waits until the ranks have closed the leases that `close_filled` ended."""
        if self._forgetting:
            await asyncio.wait(self._forgetting)

    # ---- events of one rank

    def filled(self, totals: LeaseTotals) -> None:
        """A rank has its share of a lease."""
        lease = self._leases.get(totals.number)
        if lease is None:
            return  # closed in the meantime
        lease.filled.append(totals)
        if lease.is_filled:
            assert self._on_filled is not None
            self._on_filled(_sum_totals(lease.filled))

    def refused(self, refused: RefusedSegment) -> None:
        """A rank has refused a segment."""
        assert self._on_refused is not None
        self._on_refused(refused)


async def _forget(number: int, lease: _Lease) -> None:
    """Closes a filled lease on its ranks. A rank that has failed has reported it, and the node ends."""
    await asyncio.wait([lease.opening])
    with suppress(BatonError):
        await all_done(rank.close_lease(number) for rank in lease.ranks)


def _sum_totals(totals: Sequence[LeaseTotals]) -> LeaseTotals:
    return LeaseTotals(
        totals[0].number,
        bytes=sum(each.bytes for each in totals),
        segments=sum(each.segments for each in totals),
        seconds=max(each.seconds for each in totals),
    )
