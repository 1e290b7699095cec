"""Entries on their way from one node's host memory to another's, on the transfer thread: both ends of a pull.

reader: takes places in host memory ──► receives each entry straight into its place ──► the entry can be found
owner:  host memory or a store ──► pins the entry ──► sends it from where it lies ──► unpins it

A pull has no cache in it: its reader checks an entry when it loads it, as it checks one from a file.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.core.errors import DataLoss, InternalError
from baton.core.kv_entries import EntryKey
from kvtransfer.offload_tiers import EntryTiers, Fetch
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


@dataclass(eq=False)
class _Pull:
    """The reader's end of one pull.

    Attributes:
        places: of the entries that have not begun to arrive, by index.
        arriving: entries that are being received.
        others: entries that something else was bringing to host memory already, such as another pull, by index.
        end: set by `end`: how many of the first entries it waits for, until when, and whom to tell.
        is_lost: nothing more can arrive.
        is_dropped: what still arrives is not kept.
    """

    peer: int
    keys: tuple[EntryKey, ...]
    places: dict[int, HostPlace]
    others: dict[int, EntryKey]
    arriving: dict[int, tuple[HostPlace, TransferRequest]] = field(default_factory=dict)
    end: "tuple[int, float, Future[int]] | None" = None
    is_lost: bool = False
    is_dropped: bool = False

    def awaits(self, first: int) -> bool:
        """Whether one of the first entries is still to come."""
        return any(index < first for index in (*self.places, *self.arriving))


@dataclass(eq=False)
class _Serving:
    """The owner's end of one pull.

    Attributes:
        ahead: entries that are pinned, or are being read from a store.
        sending: entries in flight, by index.
        stop: entries from this one on are not sent.
        begun: how many of the first entries are ahead, in flight or sent.
    """

    peer: int
    number: int
    keys: tuple[EntryKey, ...]
    future: "Future[int]"
    stop: int
    begun: int = 0
    next: int = 0
    ahead: deque[Fetch] = field(default_factory=deque)
    sending: dict[int, tuple[Fetch, TransferRequest]] = field(default_factory=dict)

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
        self._pulls: dict[tuple[int, int], _Pull] = {}
        self._serving: list[_Serving] = []

    @property
    def in_flight(self) -> int:
        """How many pulls have not ended, at either end."""
        return sum(bool(pull.places or pull.arriving) for pull in self._pulls.values()) + len(self._serving)

    # ---- the reader's end

    def begin(self, peer: int, number: int, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """Takes places for the entries that host memory lacks, until there is no room. The future gets the number of
        leading entries that have a place then; ask the owner for these, and call `end`."""
        if (peer, number) in self._pulls:
            raise InternalError(f"pull {number:x} has begun already", field="number", value=number)
        room = int(self._tiers.places * _PULLED_SHARE) - sum(
            len(pull.places) + len(pull.arriving) for pull in self._pulls.values()
        )
        if self._tiers.is_dropped(keys[0].root):
            room = 0
        places: dict[int, HostPlace] = {}
        others: dict[int, EntryKey] = {}
        stop = len(keys)
        for index, key in enumerate(keys):
            if self._tiers.has(key):
                if self._tiers.is_coming(key):
                    others[index] = key
                continue
            place = self._tiers.take(key, is_pulled=True) if len(places) < room else None
            if place is None:
                stop = index
                break
            places[index] = place
        self._pulls[peer, number] = _Pull(peer, keys[:stop], places, others)
        future.set_result(stop)

    def arrived(self, arrival: Arrival) -> None:
        """Receives a message of a link for pulls into its entry's place, or drops it."""
        number, index = arrival.tag >> INDEX_BITS, arrival.tag % (1 << INDEX_BITS)
        pull = self._pulls.get((arrival.peer, number))
        place = None if pull is None else pull.places.get(index)
        if pull is None or place is None or arrival.num_bytes != place.tensor.numel():
            self._transport.discard(arrival)  # late, or of another size
            return
        del pull.places[index]
        pull.arriving[index] = place, self._transport.receive(arrival, place.tensor)

    def end(self, peer: int, number: int, first: int, timeout_s: float, future: "Future[int]") -> None:
        """Waits for the first entries, then gives back the places of the others. The future gets the number of leading
        entries that host memory has, which may have lost some again. It gets DataLoss if an entry from the peer has not
        arrived in time: disconnect the peer then, because it may still be arriving."""
        pull = self._pulls.get((peer, number))
        if pull is None:
            future.set_result(0)
            return
        pull.end = first, self._clock() + timeout_s, future
        self._advance_pull((peer, number), pull)

    # ---- the owner's end

    def serve(self, peer: int, number: int, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """Sends entries to a reader. The future gets the number of leading entries that were sent, once none of them
        is in flight: soon after the first one that is not there, or after `lost`."""
        self._serving.append(_Serving(peer, number, keys, future, stop=len(keys)))

    # ---- both

    def drop_root(self, root: bytes) -> None:
        """Ends the pulls of this root: nothing more that arrives is kept, and nothing more is sent. The tiers let
        nothing of it come back for a while."""
        for pull in self._pulls.values():
            if pull.keys and pull.keys[0].root == root:
                pull.is_dropped = True
                self._give_back(pull)
        for serving in self._serving:
            if serving.keys[0].root == root:
                self._stop_at(serving, serving.next)

    def lost(self, peer: int) -> None:
        """Ends the pulls of a peer. The caller then has the transport cancel what is in flight."""
        for pull in self._pulls.values():
            if pull.peer == peer:
                pull.is_lost = True
                self._give_back(pull)
        for serving in self._serving:
            if serving.peer == peer:
                self._stop_at(serving, serving.next)

    def holds(self, peer: int) -> bool:
        """Whether anything of that peer is in flight, and so may still be written to or read."""
        receiving = any(pull.arriving for pull in self._pulls.values() if pull.peer == peer)
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
            self._give_back(pull)
            for place, _ in pull.arriving.values():
                self._tiers.abandon(place)
        for serving in self._serving:
            self._stop_at(serving, serving.next)
            for fetch, _ in serving.sending.values():
                self._tiers.release(fetch)
        self._pulls.clear()
        self._serving.clear()

    def _advance_pull(self, key: tuple[int, int], pull: _Pull) -> bool:
        over = [index for index, (_, request) in pull.arriving.items() if request.done]
        for index in over:
            place, request = pull.arriving.pop(index)
            if request.failure() is None and not pull.is_dropped:
                self._tiers.commit_pulled(place)
            else:
                self._tiers.abandon(place)
        return self._end_pull(key, pull) or bool(over)

    def _end_pull(self, key: tuple[int, int], pull: _Pull) -> bool:
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
        if pull.arriving or (pull.end is None and not pull.is_lost):
            return False
        del self._pulls[key]
        return True

    def _others_bring(self, pull: _Pull, first: int) -> bool:
        """Whether something else still brings one of the first entries."""
        if pull.others:
            coming = {index: key for index, key in pull.others.items() if self._tiers.is_coming(key)}
            pull.others = {} if pull.is_lost else coming
        return any(index < first for index in pull.others)

    def _give_back(self, pull: _Pull) -> None:
        for place in pull.places.values():
            self._tiers.abandon(place)
        pull.places.clear()

    def _advance_serving(self, serving: _Serving) -> bool:
        over = [index for index, (_, request) in serving.sending.items() if request.done]
        for index in over:
            fetch, request = serving.sending.pop(index)
            self._tiers.release(fetch)
            if request.failure() is not None:
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
            serving.ahead.popleft()
            tag = serving.number << INDEX_BITS | serving.next
            serving.sending[serving.next] = fetch, self._transport.send(serving.peer, tag, fetch.place.tensor)
            serving.next += 1
            begun = True
        return begun

    def _stop_at(self, serving: _Serving, index: int) -> None:
        """Sends nothing more; entries from this one on count as not sent."""
        serving.stop = min(serving.stop, index)
        while serving.ahead:
            self._tiers.release(serving.ahead.popleft())
