"""Entries on their way from one node's host memory to another's, on the transfer thread: both ends of a pull.

reader: takes places in host memory ──► receives each entry straight into its place ──► the entry can be found
owner:  host memory or a store ──► pins the entry ──► sends it from where it lies ──► unpins it

Between ranks that keep unlike parts of an entry, the owner sends a piece that it has cut from the entry, and the reader
joins the pieces of all its links (`EntryCut`).

A pull has no cache in it: its reader checks an entry when it loads it, as it checks one from a file.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.core.errors import DataLoss, InternalError
from baton.core.kv_entries import EntryKey
from kvtransfer.entry_cuts import EntryCut, cells_of, complete
from kvtransfer.offload_reads import Fetch
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.records import EntryLink
from kvtransfer.stores.host_memory import HostPlace
from kvtransfer.transports.transport import Arrival, TransferRequest, Transport

# A tag is the pull's number, which only the two nodes know, and the entry's index.
NUMBER_BITS = 40
INDEX_BITS = 24
# Entries of one pull that its owner has pinned: some to send next, and some in flight.
_AHEAD = 2
_IN_FLIGHT = 4
# The share of host memory's places that all pulls of a reader may hold.
_PULLED_SHARE = 1 / 2
# A reader of pieces takes so many bytes of them at a time from a pull, and at least twice what its owners have in
# flight. Small messages have left their owner before they are received, so there may be more of them.
_JOINING_BYTES = 64 << 20


@dataclass(eq=False)
class _Coming:
    """An entry that has not arrived whole.

    Attributes:
        cells_left: how many (layer, head) cells have not arrived.
        peers: those whose message about it has begun to arrive.
        receiving: how many of these messages are being received.
        is_lost: it never becomes whole.
    """

    place: HostPlace
    cells_left: int
    peers: set[int] = field(default_factory=set)
    receiving: int = 0
    is_lost: bool = False


@dataclass(frozen=True, eq=False)
class _Receiving:
    """A message about an entry that is being received: into the entry's place, or before its pieces are joined."""

    index: int
    cut: EntryCut | None
    message: Tensor
    request: TransferRequest


@dataclass(eq=False)
class _Pull:
    """The reader's end of one pull.

    Attributes:
        links: what each peer's link carries; None: whole entries.
        coming: entries that have not arrived whole, by index.
        others: entries that something else was bringing to host memory already, such as another pull, by index.
        end: set by `end`: how many of the first entries it waits for, until when, and whom to tell.
        is_lost: nothing more can arrive.
    """

    links: dict[int, EntryCut | None]
    keys: tuple[EntryKey, ...]
    coming: dict[int, _Coming]
    others: dict[int, EntryKey]
    receiving: list[tuple[int, _Receiving]] = field(default_factory=list)
    end: "tuple[int, float, Future[int]] | None" = None
    is_lost: bool = False

    def awaits(self, first: int) -> bool:
        """Whether one of the first entries is still to come."""
        return any(index < first for index in self.coming)

    @property
    def joining_bytes(self) -> int:
        """Size of the messages that are received before their pieces are joined."""
        return sum(each.message.numel() for _, each in self.receiving if each.cut is not None)


@dataclass(frozen=True, eq=False)
class _Sending:
    """A message in flight. Its memory is that of the pinned entry, or a piece's own."""

    pinned: Fetch | None
    message: Tensor
    request: TransferRequest


@dataclass(eq=False)
class _Serving:
    """The owner's end of one pull.

    Attributes:
        cut: what the link carries; None: whole entries.
        ahead: entries that are pinned, or are being read from a store.
        sending: messages in flight, by their entries' index.
        stop: entries from this one on are not sent.
        begun: how many of the first entries are ahead, in flight or sent.
    """

    peer: int
    number: int
    keys: tuple[EntryKey, ...]
    future: "Future[int]"
    stop: int
    cut: EntryCut | None
    begun: int = 0
    next: int = 0
    ahead: deque[Fetch] = field(default_factory=deque)
    sending: dict[int, _Sending] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return not self.sending and self.next >= self.stop


class EntryPulls:
    """Both ends of all pulls of one rank. The thread calls `step` repeatedly.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, tiers: EntryTiers, transport: Transport, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._transport = transport
        self._clock = clock
        self._between = transport.progress
        self._pulls: dict[int, _Pull] = {}
        self._serving: list[_Serving] = []

    @property
    def in_flight(self) -> int:
        """How many pulls have not ended, at either end."""
        return sum(bool(pull.coming) for pull in self._pulls.values()) + len(self._serving)

    # ---- the reader's end

    def begin(self, number: int, keys: tuple[EntryKey, ...], links: Sequence[EntryLink], future: "Future[int]") -> None:
        """Takes places for the entries that host memory lacks, until there is no room. The future gets the number of
        leading entries that have a place then; ask the owner for these, and call `end`.

        Args:
            links: from the owner's ranks. Each brings whole entries, or all of them together do.
        """
        if number in self._pulls:
            raise InternalError(f"pull {number:x} has begun already", field="number", value=number)
        room = int(self._tiers.places * _PULLED_SHARE) - sum(len(pull.coming) for pull in self._pulls.values())
        if self._tiers.is_dropped(keys[0].root):
            room = 0
        coming: dict[int, _Coming] = {}
        others: dict[int, EntryKey] = {}
        stop, cells = len(keys), cells_of(self._tiers.layout)
        for index, key in enumerate(keys):
            if self._tiers.has(key):
                if self._tiers.is_coming(key):
                    others[index] = key
                continue
            place = self._tiers.take(key, is_pulled=True) if len(coming) < room else None
            if place is None:
                stop = index
                break
            coming[index] = _Coming(place, cells)
        self._pulls[number] = _Pull({link.peer: self._cut(link) for link in links}, keys[:stop], coming, others)
        future.set_result(stop)

    def arrived(self, arrival: Arrival) -> None:
        """Receives a message of a link for pulls, into its entry's place if it is a whole entry, or drops it."""
        number, index = arrival.tag >> INDEX_BITS, arrival.tag % (1 << INDEX_BITS)
        pull = self._pulls.get(number)
        coming = None if pull is None or arrival.peer not in pull.links else pull.coming.get(index)
        if pull is None or coming is None or coming.is_lost or arrival.peer in coming.peers:
            self._transport.discard(arrival)  # late, or sent twice
            return
        cut = pull.links[arrival.peer]
        num_bytes = coming.place.tensor.numel() if cut is None else cut.message_bytes
        # NOTE: only one peer may write to the place itself.
        is_expected = not coming.peers if cut is None else pull.joining_bytes + num_bytes <= self._joining_max(pull)
        if not is_expected or arrival.num_bytes != num_bytes:
            self._transport.discard(arrival)
            return
        message = coming.place.tensor if cut is None else torch.empty(num_bytes, dtype=torch.uint8)
        coming.peers.add(arrival.peer)
        coming.receiving += 1
        request = self._transport.receive(arrival, message)
        pull.receiving.append((arrival.peer, _Receiving(index, cut, message, request)))

    def end(self, number: int, first: int, timeout_s: float, future: "Future[int]") -> None:
        """Waits for the first entries, then gives back the places of the others. The future gets the number of leading
        entries that host memory has, which may have lost some again. It gets DataLoss if one of them has not arrived in
        time: disconnect the peers then, because it may still be arriving."""
        pull = self._pulls.get(number)
        if pull is None:
            future.set_result(0)
            return
        pull.end = first, self._clock() + timeout_s, future
        self._advance_pull(number, pull)

    # ---- the owner's end

    def serve(self, link: EntryLink, number: int, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """Sends entries, or what the link carries of them, to a reader. The future gets the number of leading entries
        that were sent, once none of them is in flight: soon after the first one that is not there or is damaged, or
        after `lost`."""
        self._serving.append(_Serving(link.peer, number, keys, future, stop=len(keys), cut=self._cut(link)))

    # ---- both

    def drop_root(self, root: bytes) -> None:
        """Ends the pulls of this root: nothing more that arrives is kept, and nothing more is sent. The tiers let
        nothing of it come back for a while."""
        for pull in self._pulls.values():
            if pull.keys and pull.keys[0].root == root:
                self._give_back(pull)
        for serving in self._serving:
            if serving.keys[0].root == root:
                self._stop_at(serving, serving.next)

    def lost(self, peer: int) -> None:
        """Ends the pulls of a peer. The caller then has the transport cancel what is in flight."""
        for pull in self._pulls.values():
            if peer in pull.links:
                pull.is_lost = True
                self._give_back(pull)
        for serving in self._serving:
            if serving.peer == peer:
                self._stop_at(serving, serving.next)

    def holds(self, peer: int) -> bool:
        """Whether anything of that peer is in flight, and so may still be written to or read."""
        receiving = any(each == peer for pull in self._pulls.values() for each, _ in pull.receiving)
        return receiving or any(serving.sending for serving in self._serving if serving.peer == peer)

    def step(self) -> bool:
        """Advances every pull. Returns whether anything happened."""
        if not self._pulls and not self._serving:
            return False
        pulled = [self._advance_pull(key, pull) for key, pull in tuple(self._pulls.items())]
        served = [self._advance_serving(serving) for serving in tuple(self._serving)]
        return any(pulled) or any(served)

    def close(self) -> None:
        """Gives everything back, once the transport is closed."""
        for pull in self._pulls.values():
            for coming in pull.coming.values():
                self._tiers.abandon(coming.place)
        for serving in self._serving:
            self._stop_at(serving, serving.next)
            for sending in serving.sending.values():
                self._unpin(sending)
        self._pulls.clear()
        self._serving.clear()

    def _joining_max(self, pull: _Pull) -> int:
        return max(_JOINING_BYTES, 2 * _IN_FLIGHT * sum(cut.message_bytes for cut in pull.links.values() if cut))

    def _cut(self, link: EntryLink) -> EntryCut | None:
        return EntryCut(self._tiers.layout, link.flows) if link.flows else None

    def _advance_pull(self, number: int, pull: _Pull) -> bool:
        over = [each for each in pull.receiving if each[1].request.done]
        for each in over:
            pull.receiving.remove(each)
            self._received(pull, each[1])
        return self._end_pull(number, pull) or bool(over)

    def _received(self, pull: _Pull, received: _Receiving) -> None:
        """Keeps an entry that is whole now, or gives its place back if it never will be."""
        index, cut = received.index, received.cut
        coming, key = pull.coming.get(index), pull.keys[index]
        if coming is None:  # another peer, whose link carries all of it too, was faster
            return
        coming.receiving -= 1
        if received.request.failure() is not None:
            coming.is_lost = True
        elif cut is None:
            coming.cells_left = 0
        elif not coming.is_lost:
            if cut.join(key, received.message, coming.place.tensor, between=self._between):
                coming.cells_left -= cut.cells
            else:
                coming.is_lost = True
                self._tiers.damaged_on_its_way()
        if coming.is_lost and not coming.receiving:
            del pull.coming[index]
            self._tiers.abandon(coming.place)
        elif coming.cells_left <= 0 and not coming.is_lost:
            if cut is not None:
                complete(self._tiers.layout, key, coming.place.tensor, between=self._between)
            del pull.coming[index]
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
                future.set_result(self._tiers.count(pull.keys))
        if pull.receiving or (pull.end is None and not pull.is_lost):
            return False
        del self._pulls[number]
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

    def _advance_serving(self, serving: _Serving) -> bool:
        over = [index for index, sending in serving.sending.items() if sending.request.done]
        for index in over:
            sent = serving.sending.pop(index)
            self._unpin(sent)
            if sent.request.failure() is not None:
                self._stop_at(serving, index)
            else:
                self._tiers.served()
        begun = self._send_next(serving)
        if not serving.is_over:
            return bool(over) or begun
        self._serving.remove(serving)
        serving.future.set_result(serving.stop)
        return True

    def _send_next(self, serving: _Serving) -> bool:
        """Looks ahead, and sends what is there. Returns whether anything was begun."""
        while len(serving.ahead) < _AHEAD and serving.begun < serving.stop:
            key = serving.keys[serving.begun]
            # An entry that comes from another node may come from this reader, which waits for it too.
            fetch = Fetch(key, done=True) if self._tiers.is_pulling(key) else self._tiers.fetch(key)
            if fetch is None:
                break
            serving.ahead.append(fetch)
            serving.begun += 1
        begun = False
        while serving.ahead and serving.ahead[0].done and len(serving.sending) < _IN_FLIGHT:
            fetch = serving.ahead[0]
            if fetch.place is None:
                self._stop_at(serving, serving.next)
                break
            message = self._to_send(serving, fetch, fetch.place.tensor)
            if message is None:
                self._tiers.damaged(fetch)
                self._stop_at(serving, serving.next)
                break
            serving.ahead.popleft()
            tag = serving.number << INDEX_BITS | serving.next
            request = self._transport.send(serving.peer, tag, message)
            serving.sending[serving.next] = sending = _Sending(fetch if serving.cut is None else None, message, request)
            if sending.pinned is None:
                self._tiers.release(fetch)
            serving.next += 1
            begun = True
        return begun

    def _to_send(self, serving: _Serving, fetch: Fetch, entry: Tensor) -> Tensor | None:
        """The message about an entry. Returns None if a piece must be cut from it, and it is damaged."""
        if serving.cut is None:
            return entry
        message = torch.empty(serving.cut.message_bytes, dtype=torch.uint8)
        return message if serving.cut.cut(fetch.key, entry, message, between=self._between) else None

    def _unpin(self, sent: _Sending) -> None:
        if sent.pinned is not None:
            self._tiers.release(sent.pinned)

    def _stop_at(self, serving: _Serving, index: int) -> None:
        """Sends nothing more; entries from this one on count as not sent."""
        serving.stop = min(serving.stop, index)
        while serving.ahead:
            self._tiers.release(serving.ahead.popleft())
