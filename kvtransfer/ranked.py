"""A node's KV transfer over all its ranks: every call goes to each rank, for each of the rank's links.

It opens pairs and sends. `kvtransfer.ranked_leases` has the verbs for leases, `kvtransfer.ranked_entries` those for
entries.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from baton.core.errors import BatonError, DataLoss, PeerRefused
from kvtransfer.conversion import KVConversion
from kvtransfer.flows import Flow, RankPair
from kvtransfer.link import LinkSpeed
from kvtransfer.pair_ends import PairEnd, ends_of, lanes_of, part_of, rounds_of, takes_part
from kvtransfer.rank_transfer import OnFailed, OnFilled, OnRefused, RankTransfer, all_done
from kvtransfer.ranked_entries import RankedEntries
from kvtransfer.ranked_leases import RankedLeases
from kvtransfer.records import (
    EntryCounters,
    LinkMeasure,
    PeerTraffic,
    SendJob,
    TransferCounters,
    WarmUp,
)
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import Segment

# Makes one rank's transfer, which reports leases to these two callbacks.
MakeTransfer = Callable[[OnFilled, OnRefused], RankTransfer]


class RankedTransfer(AbstractAsyncContextManager["RankedTransfer"]):
    """The verbs of `RankTransfer` for pairs of nodes; docs here say only what differs. Used on the event loop of
    `start`.

    Args:
        makers: each makes one rank's transfer; rank 0's comes first.
        message_bytes: the largest message that each of them accepts.
        has_stores: whether there may be stores below host memory.

    Attributes:
        leases: the verbs for leases.
        entries: the verbs for entries.
    """

    def __init__(self, makers: Sequence[MakeTransfer], *, message_bytes: int, has_stores: bool = True) -> None:
        self.message_bytes = message_bytes
        self._ranks: list[RankTransfer] = []
        self.leases = RankedLeases(self._ranks)
        self._ranks += [make(self.leases.filled, self.leases.refused) for make in makers]
        for rank in self._ranks:
            rank.watch(partial(self._link_failed, rank), self._failed)
        self._failure: BatonError | None = None
        self._on_failed: OnFailed | None = None
        self._on_pair_failed: dict[int, OnFailed] = {}
        self._pairs: dict[int, tuple[PairEnd, ...]] = {}
        self.entries = RankedEntries(self._ranks, self._pairs, has_stores=has_stores)

    def on_failed(self, callback: OnFailed) -> None:
        """Sets the callback for a rank that cannot continue. It is called once, on the event loop, and at once if a
        rank has failed already."""
        self._on_failed = callback
        if self._failure is not None:
            callback(self._failure)

    async def start(self) -> None:
        """Starts all ranks. If one fails, closes all of them and raises its error."""
        assert self.leases.are_delivered, "leases.deliver_to comes first"
        try:
            await asyncio.gather(*(rank.start() for rank in self._ranks))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        await self.leases.all_forgotten()

    @property
    def linked(self) -> bool:
        """Whether a pair is open or still closing."""
        return bool(self._pairs)

    async def reopen(self, *, incarnation: int, receive_bytes_per_s: float | None) -> None:
        """Reopens all ranks, after the last pair and the last lease."""
        assert not self._pairs, "disconnect comes first"
        await self.leases.forget_all()
        await all_done(
            rank.reopen(incarnation=incarnation, receive_bytes_per_s=receive_bytes_per_s) for rank in self._ranks
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ---- pairs

    async def listen(
        self, pair: int, links: Mapping[RankPair, tuple[Flow, ...]], *, sends: bool, on_failed: OnFailed | None = None
    ) -> dict[RankPair, bytes]:
        """Opens this node's ends of a pair's links; returns the address of each.

        Args:
            pair: at the receiver, the first of the sender numbers that it drew for the peer's ranks; at the sender, a
                number of its own, followed by unused numbers for the peer's ranks.
            sends: whether this node is the sender.
            on_failed: called, once or more, when a link of the pair has broken. Then disconnect the pair.
        """
        if on_failed is not None:
            self._on_pair_failed[pair] = on_failed
        self._pairs[pair] = ends = tuple(ends_of(pair, links, self._ranks, sends=sends))
        addresses = await asyncio.gather(*(end.rank.listen(end.number) for end in ends))
        return {end.link: address for end, address in zip(ends, addresses, strict=True)}

    async def connect(
        self,
        pair: int,
        addresses: Mapping[RankPair, bytes],
        *,
        message_bytes: int | None = None,
        conversion: KVConversion | None = None,
        incarnation: int = 0,
        sealed: bool = False,
        has_draft: bool = True,
    ) -> None:
        """Connects all links of a pair. Raises PeerRefused if the peer listens on other links."""
        ends = self._pairs[pair]
        if addresses.keys() != {end.link for end in ends}:
            raise PeerRefused(
                f"the peer listens on {len(addresses)} links, which are not the {len(ends)} that this node expects",
                field="links",
                cure="start both nodes with the same version",
            )
        calls = [partial(end.rank.connect, end.number, addresses[end.link]) for end in ends]
        await asyncio.gather(
            *(
                call(
                    message_bytes=message_bytes,
                    group=pair,
                    conversion=conversion,
                    incarnation=incarnation,
                    sealed=sealed,
                    has_draft=has_draft,
                )
                for call in calls
            )
        )

    async def disconnect(self, pair: int) -> tuple[int, ...]:
        """Closes a pair's links; no-op for pairs that never listened."""
        self._on_pair_failed.pop(pair, None)
        ends = self._pairs.get(pair, ())
        leases = await asyncio.gather(*(end.rank.disconnect(end.number) for end in ends))
        self._pairs.pop(pair, None)
        return tuple(sorted({lease for each in leases for lease in each}))

    async def warm_up(self, pair: int, sender_number: int) -> dict[RankPair, WarmUp]:
        """Warms every link up. Links that share a rank take turns, so that each is measured undisturbed."""
        sent: dict[RankPair, WarmUp] = {}
        for ends in rounds_of(self._pairs[pair]):
            warm = await asyncio.gather(
                *(end.rank.warm_up(end.number, sender_number + end.link.sender_rank) for end in ends)
            )
            sent.update(zip((end.link for end in ends), warm, strict=True))
        return sent

    async def warmed_up(self, pair: int, sent: Mapping[RankPair, WarmUp], *, timeout_s: float) -> LinkMeasure:
        """Measures the pair: its GB/s are the slowest link's, times the number of links that share no rank; transport
        and times are also the slowest link's.

        Raises:
            PeerRefused: the peer has not warmed up the links that this node expects.
        """
        ends = self._pairs[pair]
        if sent.keys() != {end.link for end in ends}:
            raise PeerRefused("the peer has not warmed up the links that this node expects", field="links")
        measures: list[LinkMeasure] = []
        for round_ends in rounds_of(ends):
            measures += await asyncio.gather(
                *(
                    end.rank.warmed_up(end.number, sent[end.link].messages, sent[end.link].bytes, timeout_s=timeout_s)
                    for end in round_ends
                )
            )
        slowest = min(measures, key=lambda measure: measure.gigabytes_per_s)
        return LinkMeasure(
            slowest.transport,
            slowest.gigabytes_per_s * lanes_of(ends),
            latency_s=max(measure.latency_s for measure in measures),
            message_cost_s=max(measure.message_cost_s for measure in measures),
        )

    async def use_link(self, pair: int, speed: LinkSpeed) -> None:
        """Sets the measured speed of a pair, from which each link's message sizes follow.

        Args:
            speed: of the pair, as `warmed_up` measured it.
        """
        ends = self._pairs[pair]
        each = replace(speed, bytes_per_s=speed.bytes_per_s / lanes_of(ends))
        await asyncio.gather(*(end.rank.use_link(end.number, each) for end in ends))

    # ---- sending

    async def send(self, job: SendJob) -> tuple[Segment, ...]:
        """Sends the job over all links whose two ranks take part, a part over each. Every link numbers its segments
        from the job's first number. Returns or raises once nothing of the job is in flight on any link."""
        ends = self._pairs.get(job.peer)
        if not ends:
            raise DataLoss("the peer is not connected", field="peer", value=job.peer)
        ends = tuple(end for end in ends if takes_part(job, end.link))
        if not ends:
            raise DataLoss("the peer has no such rank", field="owner_rank", value=job.owner_there)
        parts = [(end.rank, part) for end in ends if (part := part_of(job, end)) is not None]
        if len(parts) == 1:
            return await parts[0][0].send(parts[0][1])
        sent = await all_done(rank.send(part) for rank, part in parts)
        return tuple(segment for segments in sent for segment in segments)

    async def quiet(self, pair: int, lease: int) -> None:
        """Ends the lease's jobs on every link; no-op for pairs that never listened."""
        await asyncio.gather(*(end.rank.quiet(end.number, lease) for end in self._pairs.get(pair, ())))

    # ---- failures

    def _link_failed(self, rank: RankTransfer, number: int, error: BatonError) -> None:
        for pair, ends in self._pairs.items():
            if any(end.rank is rank and end.number == number for end in ends) and pair in self._on_pair_failed:
                self._on_pair_failed[pair](error)
                return

    def _failed(self, error: BatonError) -> None:
        if self._failure is None:
            self._failure = error
            if self._on_failed is not None:
                self._on_failed(error)

    # ---- status

    def counters(self) -> TransferCounters:
        """Sums over all ranks, with peers by their pairs' numbers. Counts of other processes are up to a second old."""
        counters = [rank.counters() for rank in self._ranks]
        refusals = {
            refusal: count
            for refusal in SegmentRefusal
            if (count := sum(each.refusals.get(refusal, 0) for each in counters))
        }
        by_rank = dict(zip(map(id, self._ranks), counters, strict=True))
        peers: dict[int, PeerTraffic] = {}
        for pair, ends in self._pairs.items():
            traffic = [found for end in ends if (found := by_rank[id(end.rank)].peers.get(end.number))]
            if traffic:
                peers[pair] = PeerTraffic(
                    sum(each.bytes_total for each in traffic), sum(each.segments_total for each in traffic)
                )
        return TransferCounters(
            refusals,
            peers,
            sum(each.converted for each in counters),
            sum(each.bytes_total for each in counters),
            sum(each.segments_total for each in counters),
            EntryCounters.of_ranks([each.entries for each in counters]),
        )

    def stuck(self, *, after_s: float) -> str:
        """The place where the first stuck rank is stuck; empty if none is."""
        return next((where for rank in self._ranks if (where := rank.stuck(after_s=after_s))), "")
