"""The verbs of one rank's KV transfer, stated once: arguments, order and errors.

`KVTransfer` implements them over a cache of its own process, `baton.node.ranks.remote.RemoteTransfer` calls another
process's `KVTransfer`, and `RankedTransfer` calls all ranks of a node, with `RankedEntries` for entries.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from baton.core.errors import BatonError
from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, StoreChanges
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.link import LinkSpeed
from kvtransfer.records import EntryLink, LinkMeasure, PullJob, RefusedSegment, SendJob, TransferCounters, WarmUp
from kvtransfer.segments import Segment

T = TypeVar("T")

# A lease has all its tokens. Called once for each lease, unless the lease is closed before.
OnFilled = Callable[[LeaseTotals], None]
# A message was not scattered, so its lease cannot be trusted to become complete.
OnRefused = Callable[[RefusedSegment], None]
# The link to a peer has broken, for this reason: nothing more comes or goes over it. Disconnect it.
OnLinkFailed = Callable[[int, BatonError], None]
# The transfer cannot go on, for this reason. Every call fails from now on; the process should end.
OnFailed = Callable[[BatonError], None]

# Entries with these digests have left host memory for others.
OnStoresChanged = Callable[[StoreChanges], None]


class RankTransfer(Protocol):
    """One rank's transfer. All methods and callbacks belong to the event loop that `start` ran on.

    Two ranks are linked in this order: `listen` on both, `connect` on both, `warm_up` on the sender, `warmed_up` on the
    receiver, `use_link` on the sender. A link ends with `disconnect`, on each end by itself.

    The receiver opens a lease before the sender sends for it, and closes every lease, filled or not.
    """

    def watch(self, on_link_failed: OnLinkFailed, on_failed: OnFailed) -> None:
        """Sets the callbacks for a broken link and for a transfer that cannot continue; call it before `start`."""
        ...

    async def start(self) -> None:
        """Opens the transport.

        Raises:
            ConfigError: the transport does not exist, or cannot start.
        """

    async def close(self) -> None:
        """Cancels what is in flight. Every call that still waits raises an error."""

    async def reopen(self, *, incarnation: int, receive_bytes_per_s: float | None) -> None:
        """Closes the transport and opens it again for another incarnation of the node. Entries stay, and so do their
        counters; all other counters begin at 0. Call it when no lease and no link is open.

        Raises:
            ConfigError: the transport cannot start.
        """

    async def listen(self, peer: int) -> bytes:
        """Opens this end of a link; returns the address for this one peer's `connect`.

        Args:
            peer: at the receiver, the sender number that it chose for the peer; at the sender, its own number for the
                peer.

        Raises:
            InternalError: the number is in use.
            DataLoss, Overloaded: no link can be opened now.
        """
        ...

    async def connect(
        self,
        peer: int,
        address: bytes,
        *,
        message_bytes: int | None = None,
        group: int | None = None,
        conversion: KVConversion | None = None,
        incarnation: int = 0,
        sealed: bool = False,
        has_draft: bool = True,
    ) -> None:
        """Makes the endpoint to a peer that listens.

        Args:
            message_bytes: the largest message that the peer accepts; None: this rank's own limit.
            group: shared by peers that fill leases together; None: the peer fills them alone.
            conversion: applied to the KV sent to this peer; None: KV keeps its dtype.
            incarnation: of the peer's node, which fills no lease that is bound to another incarnation.
            sealed: segments to and from the peer have seals, which need their leases' keys.
            has_draft: the peer sends KV of layers that draft tokens, if this rank's cache has it.

        Raises:
            PeerRefused: the address belongs to another kind of transport, or would end this process.
            DataLoss: the peer cannot be reached.
            Overloaded: the address of an unauthenticated peer cannot be tried now.
            ConfigError: no segment fits into the peer's messages.
        """

    async def disconnect(self, peer: int) -> tuple[int, ...]:
        """Closes the link. Returns when nothing of the peer is in flight, whether the peer is alive or not.

        Returns:
            The open leases that the peer or its group has begun to fill. They will never be complete.
        """
        ...

    async def warm_up(self, peer: int, sender_number: int) -> WarmUp:
        """Sends messages through every staging slot. The receiver must have connected.

        Raises:
            DataLoss: the link failed.
        """
        ...

    async def warmed_up(self, peer: int, messages: int, bytes: int, *, timeout_s: float) -> LinkMeasure:
        """Waits for the peer's warm-up messages, checks and times them, then measures the latency by round trips.

        Args:
            messages, bytes: what the peer's `warm_up` returned.

        Raises:
            DataLoss: messages are damaged, or their number differs from the peer's count.
            PeerRefused: they carry no digests, and this rank requires digests.
            DeadlineExceeded: not all of them arrived within the timeout.
        """
        ...

    async def use_link(self, peer: int, link: LinkSpeed) -> None:
        """Sets the measured link of a peer. Jobs are then cut to the segment size that suits it, not to the largest.

        Raises:
            DataLoss: the peer is not connected.
        """

    async def send(self, job: SendJob) -> tuple[Segment, ...]:
        """Sends one job. Returns when the transport has completed all of it. Every gather is then over, also on a GPU,
        and the job's blocks may be freed.

        Cancelling the call ends the job; `quiet` then waits until nothing of it is in flight.

        Returns:
            The segments sent, without their digests.

        Raises:
            DataLoss: the link failed, or the peer is not connected. Nothing of the job is in flight then.
            Cancelled: `quiet` ended the job.
        """
        ...

    async def quiet(self, peer: int, lease: int) -> None:
        """Ends the jobs of a lease. Returns when nothing of it is in flight and nothing reads its blocks."""

    def open_lease(self, lease: LeaseGrant) -> "asyncio.Future[None]":
        """Lets one peer fill these tokens. The future is done when the lease is open; cancelling it changes nothing.

        A lease without tokens is filled at once. Until `on_filled` or the return of `close_lease`, nothing else may
        read or write the blocks' slots. That includes engine steps that were launched before and still run on a GPU,
        because scatters are not ordered after the engine's stream. At `on_filled` every scatter is over on the device.

        Raises:
            InternalError: a recent lease has the number's lease field, or the blocks cannot hold the tokens. The call
                itself raises it if the cache is in this process, else the future does.
        """
        ...

    async def close_lease(self, number: int) -> LeaseTotals:
        """Ends a lease. When this returns, nothing writes to its blocks or ever will, also on a GPU.

        Raises:
            UnknownLease: it is not open.
        """
        ...

    # ---- entries: KV that this rank keeps outside of its cache (`kvtransfer.stores`). A rank without a host cache
    # has none.

    async def save_entries(self, *saves: EntryBlocks) -> tuple[int, ...]:
        """Copies entries of some sequences from the cache to the stores, unless they are there. Returns for each
        sequence how many of the first ones the stores have then.

        Until it returns or raises nothing may write to the blocks. On a GPU the step that computed the tokens must be
        over. Cancelling the call ends it early; it then raises once nothing reads the blocks.

        Raises:
            InternalError: the cache has no such blocks, or they do not hold the entries' tokens.
        """
        ...

    async def find_entries(self, keys: tuple[EntryKey, ...]) -> int:
        """Returns how many leading keys the stores have. A later load may find fewer."""
        ...

    async def find_state(self, after: tuple[EntryKey, ...]) -> int:
        """The number of these entries up to the last one after which the stores have the recurrent state; 0: there is
        none."""
        ...

    async def load_entries(
        self, entries: EntryBlocks, *, timeout_s: float, entry_s: float = math.inf
    ) -> tuple[str, ...]:
        """Copies entries from the stores to the cache. Returns the sources of the first ones, as `Fetch.source` has
        them, which are then in their blocks, whole and checked; blocks after them hold anything. Nothing writes to the
        blocks any more when it returns or raises.

        Args:
            timeout_s: no further entry is begun after this time.
            entry_s: seconds to compute what is loaded, for each entry; a state alone counts as one. Stores that have
                taken longer lately are not read.

        Raises:
            InternalError: the cache has no such blocks, or they do not hold the entries' tokens.
        """
        ...

    async def begin_pull(self, job: PullJob, links: tuple[EntryLink, ...]) -> int:
        """Takes places in host memory for entries that peers are to send, until there is no room. Returns the number
        of leading entries that have one, or are kept already. `end_pull` must follow, whatever happens to the links.

        Args:
            links: for pulls, whose peers' numbers are at least `kvtransfer.ledger.FIRST_PULL_LINK`. Together they bring
                what this rank keeps of an entry, or each of them does.

        Raises:
            DataLoss: a peer is not connected.
        """
        ...

    async def end_pull(self, number: int, *, first: int, timeout_s: float) -> int:
        """Waits until the first entries have arrived, and gives the places of the others back. Returns the number of
        leading entries that host memory has.

        Raises:
            DataLoss: not all of the first entries have arrived in time. Disconnect the peers.
        """
        ...

    async def serve_pull(self, link: EntryLink, job: PullJob) -> int:
        """Sends the first entries that are kept here, or what the link carries of each, to a peer that has begun the
        pull. Returns how many were sent, when none of them is in flight. To end it early, disconnect the peer.

        Raises:
            DataLoss: the peer is not connected.
        """
        ...

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime, *, with_state: bool = False) -> None:
        """Keeps the first entries of a sequence for a time, as far as the stores have them and the tenant's share goes.

        Args:
            keys: of the sequence from its beginning, maybe without tokens.
            with_state: the recurrent state after the last one too.
        """
        ...

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        """Forgets entries, also those that are being saved.

        Raises:
            DeadlineExceeded: a store below host memory has not answered, and may still have them.
        """
        ...

    async def drop_entries_of(self, roots: frozenset[bytes]) -> DroppedEntries:
        """Forgets every entry with one of these roots, also those that are being saved; loads of them end. Does not
        raise for a store that fails or does not answer: the result names it."""
        ...

    def counters(self) -> TransferCounters:
        """Refusals and traffic so far."""
        ...

    def stuck(self, *, after_s: float) -> str:
        """The Python stack of a rank whose thread has not moved for that long, or why it cannot go on; else empty."""
        ...


async def until_done(future: "asyncio.Future[Any]") -> None:
    """Waits for a future's result or error, even if the caller is cancelled meanwhile; the caller then raises."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if not future.cancelled():
        future.exception()  # marks it as retrieved


async def all_done(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Waits until every call has ended; then returns all results or raises the first error."""
    waiting = tuple(calls)
    if len(waiting) == 1:  # most nodes have one rank, and a task costs as much as the call
        return [await waiting[0]]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
