"""Entries on their way from one node's host memory to another's, on the transfer thread: both ends of a pull.

reader: takes places in host memory ──► receives each entry straight into its place ──► the entry can be found
owner:  host memory or a store ──► pins the entry ──► sends it from where it lies ──► unpins it

Between ranks that keep different parts of an entry, the owner sends a piece that it has cut from the entry, and the
reader joins the pieces of all its links (`EntryCut`).

A pull does not touch the cache: the reader checks an entry when it loads it, as it does with one from a file.
"""

from collections.abc import Callable

from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.pull_receiver import PullReceiver
from kvtransfer.pull_sender import PullSender
from kvtransfer.transports.transport import Transport


class EntryPulls:
    """All pulls of one rank. The thread calls `step` repeatedly.

    Args:
        clock: monotonic seconds.

    Attributes:
        receiver: the reader's ends.
        sender: the owner's ends.
    """

    def __init__(self, tiers: EntryTiers, transport: Transport, clock: Callable[[], float]) -> None:
        self.receiver = PullReceiver(tiers, transport, clock, between=transport.progress)
        self.sender = PullSender(tiers, transport, between=transport.progress)

    @property
    def in_flight(self) -> int:
        """Number of pulls that have not ended, at either end."""
        return sum(bool(pull.coming) for pull in self.receiver.pulls.values()) + len(self.sender.serving)

    def drop_root(self, root: bytes) -> None:
        """Ends the pulls of this root: nothing more that arrives is kept, and nothing more is sent. The tiers let
        nothing of it come back for a while."""
        self.receiver.drop_root(root)
        self.sender.drop_root(root)

    def lost(self, peer: int) -> None:
        """Ends the pulls of a peer. The caller then has the transport cancel what is in flight."""
        self.receiver.lost(peer)
        self.sender.lost(peer)

    def holds(self, peer: int) -> bool:
        """Whether anything of that peer is in flight, and so may still be written to or read."""
        return self.receiver.holds(peer) or self.sender.holds(peer)

    def step(self) -> bool:
        """Advances every pull. Returns whether anything happened."""
        pulled = bool(self.receiver.pulls) and self.receiver.step()
        served = bool(self.sender.serving) and self.sender.step()
        return pulled or served

    def close(self) -> None:
        """Releases everything, once the transport is closed."""
        self.receiver.close()
        self.sender.close()
