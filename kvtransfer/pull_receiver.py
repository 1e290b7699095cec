"""The reader's end of pulls, on the transfer thread: receives entries of other nodes into places of host memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.core.errors import DataLoss, InternalError
from baton.core.kv_entries import EntryKey
from kvtransfer.entry_cuts import Between, EntryCut, LinkCuts, cells_of, complete, cuts_of
from kvtransfer.offload_jobs import Piece, num_whole, pieces_of
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.pull_sender import IN_FLIGHT, INDEX_BITS, sent_bytes
from kvtransfer.records import EntryLink, PullJob
from kvtransfer.stores.host_memory import HostPlace
from kvtransfer.transports.transport import Arrival, TransferRequest, Transport

# The share of host memory's places that all pulls of a reader may hold.
_PULLED_SHARE = 1 / 2
# A reader of pieces takes so many bytes of them at a time from a pull, and at least twice what its owners have in
# flight. Small messages have left their owner before they are received, so there may be more of them.
_JOINING_BYTES = 64 << 20


@dataclass(eq=False)
class _Coming:
    """An entry, or a piece of a state, that has not arrived whole.

    Attributes:
        cells_left: how many (layer, head) cells have not arrived.
        begun: peer and index of the messages about it that have begun to arrive.
        receiving: how many of these messages are being received.
        is_lost: it never becomes whole.
    """

    place: HostPlace
    cells_left: int
    begun: set[tuple[int, int]] = field(default_factory=set)
    receiving: int = 0
    is_lost: bool = False


@dataclass(frozen=True, eq=False)
class _Receiving:
    """A message about an entry that is being received: into the entry's place, or before its pieces are joined.

    Attributes:
        number: of what it is about, in `_Pull.pieces`.
    """

    number: int
    cut: EntryCut | None
    message: Tensor
    request: TransferRequest


@dataclass(eq=False)
class _Pull:
    """The reader's end of one pull.

    Attributes:
        links: what each peer's link carries; None: all, as it is kept.
        pieces: the entries and then the pieces of the state, as far as they have places.
        num_pieces: how many there are of both.
        coming: pieces that have not arrived whole, by their numbers.
        others: pieces that something else was bringing to host memory already, such as another pull, by number.
        end: set by `end`: how many of the first pieces it waits for, until when, and whom to tell.
        is_lost: nothing more can arrive.
    """

    job: PullJob
    links: dict[int, LinkCuts | None]
    pieces: tuple[Piece, ...]
    num_pieces: int
    coming: dict[int, _Coming]
    others: dict[int, EntryKey]
    receiving: list[tuple[int, _Receiving]] = field(default_factory=list)
    end: "tuple[int, float, Future[int]] | None" = None
    is_lost: bool = False

    @property
    def num_entries(self) -> int:
        return len(self.job.keys)

    @property
    def keys(self) -> tuple[EntryKey, ...]:
        """Keys of the pieces."""
        return tuple(key for key, _ in self.pieces)

    def named(self, number: int) -> EntryKey:
        """The entry that trailers of a piece's parts name."""
        after = self.job.state_after
        return self.pieces[number][0] if number < self.num_entries or after is None else after

    def awaits(self, first: int) -> bool:
        """Whether one of the first pieces has not arrived yet."""
        return any(number < first for number in self.coming)

    def place_of(self, peer: int, index: int) -> tuple[int, EntryCut | None]:
        """The number of the piece that a message is about, and what of it the message has; None: all. The number is -1
        if there is no such message."""
        if peer not in self.links:
            return -1, None
        cuts = self.links[peer]
        if cuts is None:
            return (index if index < self.num_pieces else -1), None
        if index < self.num_entries:
            return (-1 if cuts.entry is None else index), cuts.entry
        if index - self.num_entries >= len(cuts.state):
            return -1, None
        number, cut = cuts.state[index - self.num_entries]
        return self.num_entries + number, cut

    @property
    def joining_bytes(self) -> int:
        """Size of the messages that are received before their pieces are joined."""
        return sum(each.message.numel() for _, each in self.receiving if each.cut is not None)


class PullReceiver:
    """The entries that one rank receives by pulls from other nodes.

    Args:
        clock: monotonic seconds.
        between: called while pieces are joined, so that the transport continues.

    Attributes:
        pulls: those that have not ended, by number.
    """

    def __init__(
        self, tiers: EntryTiers, transport: Transport, clock: Callable[[], float], *, between: Between
    ) -> None:
        self.pulls: dict[int, _Pull] = {}
        self._tiers = tiers
        self._transport = transport
        self._clock = clock
        self._between = between

    def begin(self, job: PullJob, links: Sequence[EntryLink], future: "Future[int]") -> None:
        """Takes places for the entries that host memory lacks, until there is no room. The future gets the number of
        leading entries that have a place then; ask the owner for these, and call `end`.

        Args:
            links: from the owner's ranks. Each brings everything, or all of them together do.
        """
        if job.number in self.pulls:
            raise InternalError(f"pull {job.number:x} has begun already", field="number", value=job.number)
        layout = self._tiers.layout
        pieces = pieces_of(job.keys, job.state_after, layout)
        room = int(self._tiers.places * _PULLED_SHARE) - sum(len(pull.coming) for pull in self.pulls.values())
        if self._tiers.is_dropped(job.root):
            room = 0
        coming: dict[int, _Coming] = {}
        others: dict[int, EntryKey] = {}
        stop = len(pieces)
        for index, (key, forms) in enumerate(pieces):
            if self._tiers.has(key):
                if self._tiers.is_coming(key):
                    others[index] = key
                continue
            place = self._tiers.take(key, is_pulled=True) if len(coming) < room else None
            if place is None:
                stop = index
                break
            coming[index] = _Coming(place, cells_of(forms))
        cuts = {link.peer: cuts_of(layout, link) for link in links}
        self.pulls[job.number] = _Pull(job, cuts, pieces[:stop], len(pieces), coming, others)
        future.set_result(num_whole(stop, len(job.keys), len(pieces)))

    def arrived(self, arrival: Arrival) -> None:
        """Receives a message of a link for pulls, into its piece's place if it is all of it, or drops it."""
        pull, index = self.pulls.get(arrival.tag >> INDEX_BITS), arrival.tag % (1 << INDEX_BITS)
        number, cut = (-1, None) if pull is None else pull.place_of(arrival.peer, index)
        coming = None if pull is None else pull.coming.get(number)
        if pull is None or coming is None or coming.is_lost or (arrival.peer, index) in coming.begun:
            self._transport.discard(arrival)  # late, or sent twice
            return
        place = coming.place.tensor[: sent_bytes(pull.pieces[number], coming.place.tensor)]
        num_bytes = place.numel() if cut is None else cut.message_bytes
        # NOTE: only one peer may write to the place itself.
        is_expected = not coming.begun if cut is None else pull.joining_bytes + num_bytes <= self._joining_max(pull)
        if not is_expected or arrival.num_bytes != num_bytes:
            self._transport.discard(arrival)
            return
        message = place if cut is None else torch.empty(num_bytes, dtype=torch.uint8)
        coming.begun.add((arrival.peer, index))
        coming.receiving += 1
        request = self._transport.receive(arrival, message)
        pull.receiving.append((arrival.peer, _Receiving(number, cut, message, request)))

    def end(self, number: int, first: int, timeout_s: float, future: "Future[int]") -> None:
        """Waits for the first entries, then gives back the places of the others. The future gets the number of leading
        entries that host memory has, which may have lost some again. It gets DataLoss if one of them has not arrived in
        time: disconnect the peers then, because it may still be arriving."""
        pull = self.pulls.get(number)
        if pull is None:
            future.set_result(0)
            return
        wanted = first if first <= pull.num_entries else pull.num_pieces
        pull.end = wanted, self._clock() + timeout_s, future
        self._advance_pull(number, pull)

    def drop_root(self, root: bytes) -> None:
        """Keeps nothing more that arrives of this root."""
        for pull in self.pulls.values():
            if pull.job.root == root:
                self._give_back(pull)

    def lost(self, peer: int) -> None:
        """Ends the pulls from a peer. The caller then has the transport cancel what is in flight."""
        for pull in self.pulls.values():
            if peer in pull.links:
                pull.is_lost = True
                self._give_back(pull)

    def holds(self, peer: int) -> bool:
        """Whether anything of that peer is in flight, and so may still be written to."""
        return any(each == peer for pull in self.pulls.values() for each, _ in pull.receiving)

    def step(self) -> bool:
        """Advances every pull. Returns whether anything happened."""
        pulled = [self._advance_pull(key, pull) for key, pull in tuple(self.pulls.items())]
        return any(pulled)

    def close(self) -> None:
        """Releases all places, once the transport is closed."""
        for pull in self.pulls.values():
            for coming in pull.coming.values():
                self._tiers.abandon(coming.place)
        self.pulls.clear()

    def _joining_max(self, pull: _Pull) -> int:
        return max(_JOINING_BYTES, 2 * IN_FLIGHT * sum(cut.message_bytes for cut in pull.links.values() if cut))

    def _advance_pull(self, number: int, pull: _Pull) -> bool:
        over = [each for each in pull.receiving if each[1].request.done]
        for each in over:
            pull.receiving.remove(each)
            self._received(pull, each[1])
        return self._end_pull(number, pull) or bool(over)

    def _received(self, pull: _Pull, received: _Receiving) -> None:
        """Keeps an entry that is whole now, or gives its place back if it never will be."""
        number, cut = received.number, received.cut
        coming, piece = pull.coming.get(number), pull.pieces[number]
        if coming is None:  # another peer, whose link carries all of it too, was faster
            return
        coming.receiving -= 1
        if received.request.failure() is not None:
            coming.is_lost = True
        elif cut is None:
            coming.cells_left = 0
        elif not coming.is_lost:
            if cut.join(pull.named(number), received.message, coming.place.tensor, between=self._between):
                coming.cells_left -= cut.cells
            else:
                coming.is_lost = True
                self._tiers.damaged_on_its_way()
        if coming.is_lost and not coming.receiving:
            del pull.coming[number]
            self._tiers.abandon(coming.place)
        elif coming.cells_left <= 0 and not coming.is_lost:
            if cut is not None:
                complete(self._tiers.layout, piece, coming.place.tensor, between=self._between)
            del pull.coming[number]
            self._tiers.commit_pulled(coming.place)

    def _end_pull(self, number: int, pull: _Pull) -> bool:
        if pull.end is not None and not pull.end[2].done():
            first, end_s, future = pull.end
            is_late = pull.awaits(first)
            if (is_late or self._others_bring(pull, first)) and self._clock() < end_s:
                return False
            self._give_back(pull)
            if is_late:
                future.set_exception(DataLoss("entries that the peer has sent did not arrive", field="number"))
            else:
                future.set_result(num_whole(self._tiers.count(pull.keys), pull.num_entries, pull.num_pieces))
        if pull.receiving or (pull.end is None and not pull.is_lost):
            return False
        del self.pulls[number]
        return True

    def _others_bring(self, pull: _Pull, first: int) -> bool:
        """Whether something else still brings one of the first entries."""
        if pull.others:
            coming = {index: key for index, key in pull.others.items() if self._tiers.is_coming(key)}
            pull.others = {} if pull.is_lost else coming
        return any(index < first for index in pull.others)

    def _give_back(self, pull: _Pull) -> None:
        """Keeps nothing more of what arrives. Places that are being written to are given back later."""
        for index, coming in tuple(pull.coming.items()):
            coming.is_lost = True
            if not coming.receiving:
                del pull.coming[index]
                self._tiers.abandon(coming.place)
