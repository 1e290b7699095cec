"""A node's entries over all its ranks: KV outside of its cache, in stores, and in flight between nodes.

An entry counts if every rank has its share or, if the blocks have an owner, if the owner has it.
"""

import math
from collections.abc import Mapping, Sequence

from baton.core.errors import DataLoss
from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime
from kvtransfer.pair_ends import PairEnd
from kvtransfer.rank_transfer import RankTransfer, all_done
from kvtransfer.records import EntryLink, PullJob


class RankedEntries:
    """The verbs of `RankTransfer` for entries; docs here say only what differs. Belongs to its transfer's event loop.

    Args:
        ranks: of the node.
        pairs: the open pairs of the node by their numbers; its transfer changes them.
        has_stores: whether there may be stores below host memory.
    """

    def __init__(
        self, ranks: Sequence[RankTransfer], pairs: Mapping[int, tuple[PairEnd, ...]], *, has_stores: bool
    ) -> None:
        self.has_stores = has_stores
        self._ranks = ranks
        self._pairs = pairs

    async def save_entries(self, *saves: EntryBlocks) -> tuple[int, ...]:
        saved = dict[int, int]()  # by place, the least of all ranks
        by_owner: dict[int | None, list[int]] = {}
        for place, entries in enumerate(saves):
            by_owner.setdefault(entries.owner, []).append(place)
        calls = [(rank, places) for owner, places in by_owner.items() for rank in self._of(owner)]
        counts = await all_done(rank.save_entries(*(saves[place] for place in places)) for rank, places in calls)
        for (_, places), of_rank in zip(calls, counts, strict=True):
            saved |= {place: min(count, saved.get(place, count)) for place, count in zip(places, of_rank, strict=True)}
        return tuple(saved[place] for place in range(len(saves)))

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None = None) -> int:
        """
        Args:
            owner: the only rank that will load them; None: all ranks will.
        """
        return min(await all_done(rank.find_entries(keys) for rank in self._of(owner)))

    async def find_state(self, after: tuple[EntryKey, ...]) -> int:
        return min(await all_done(rank.find_state(after) for rank in self._ranks))

    async def load_entries(
        self, entries: EntryBlocks, *, timeout_s: float, entry_s: float = math.inf
    ) -> tuple[str, ...]:
        ranks = self._of(entries.owner)
        loads = await all_done(rank.load_entries(entries, timeout_s=timeout_s, entry_s=entry_s) for rank in ranks)
        return min(loads, key=len)

    async def begin_pull(self, pair: int, job: PullJob, *, owner: int | None = None) -> int:
        """
        Args:
            owner: the only rank of this node that receives them; None: every rank receives its share.
        """
        by_rank: dict[int, tuple[RankTransfer, list[EntryLink]]] = {}
        for end in self._linked(pair, receiver=owner):
            by_rank.setdefault(id(end.rank), (end.rank, []))[1].append(EntryLink(end.number, end.flows))
        return min(await all_done(rank.begin_pull(job, tuple(links)) for rank, links in by_rank.values()))

    async def end_pull(self, pair: int, number: int, *, first: int, timeout_s: float, owner: int | None = None) -> int:
        ranks = {id(end.rank): end.rank for end in self._linked(pair, receiver=owner)}.values()
        return min(await all_done(rank.end_pull(number, first=first, timeout_s=timeout_s) for rank in ranks))

    async def serve_pull(
        self, pair: int, job: PullJob, *, owner: int | None = None, owner_there: int | None = None
    ) -> int:
        """
        Args:
            owner, owner_there: as a `SendJob` has them.
        """
        ends = self._linked(pair, sender=owner, receiver=owner_there)
        return min(await all_done(end.rank.serve_pull(EntryLink(end.number, end.flows), job) for end in ends))

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime, *, with_state: bool = False) -> None:
        await all_done(rank.keep_entries(keys, keep, with_state=with_state) for rank in self._ranks)

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        await all_done(rank.drop_entries(keys) for rank in self._ranks)

    async def drop_entries_of(self, roots: frozenset[bytes]) -> DroppedEntries:
        return DroppedEntries.of_all(await all_done(rank.drop_entries_of(roots) for rank in self._ranks))

    def _linked(self, pair: int, *, sender: int | None = None, receiver: int | None = None) -> tuple[PairEnd, ...]:
        """The ends of a pair's links, of one rank of the sender or receiver if it is given."""
        ends = self._pairs.get(pair, ())
        if not ends:
            raise DataLoss("the peer is not connected", field="peer", value=pair)
        ends = tuple(
            end for end in ends if sender in (None, end.link.sender_rank) and receiver in (None, end.link.receiver_rank)
        )
        if not ends:
            raise DataLoss("the peer has no such rank", field="rank", value=receiver)
        return ends

    def _of(self, owner: int | None) -> Sequence[RankTransfer]:
        return self._ranks if owner is None else [self._ranks[owner]]
