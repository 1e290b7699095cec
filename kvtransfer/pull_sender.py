"""The owner's end of pulls, on the transfer thread: sends entries of host memory or a store to other nodes."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.core.kv_entries import EntryKey
from baton.kvcache.spec import KVKind
from kvtransfer.entry_cuts import Between, EntryCut, cuts_of
from kvtransfer.offload_jobs import Piece, pieces_of
from kvtransfer.offload_reads import Fetch
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.records import EntryLink, PullJob
from kvtransfer.transports.transport import TransferRequest, Transport

# A tag is the pull's number, which only the two nodes know, and the entry's index.
NUMBER_BITS = 40
INDEX_BITS = 24
# Entries of one pull that its owner has pinned: some to send next, and some in flight.
_AHEAD = 2
IN_FLIGHT = 4


@dataclass(frozen=True, eq=False)
class _Wanted:
    """A message of a pull.

    Attributes:
        index: in its tag.
        piece: the entry that it is about, or the piece of a state.
        cut: what of it the message has; None: all.
        named: the entry that the trailers of a cut name.
    """

    index: int
    piece: Piece
    cut: EntryCut | None
    named: EntryKey


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
        wanted: the messages: about each entry, then about what the link carries of the state.
        ahead: entries that are pinned, or are being read from a store.
        sending: messages in flight, by their places in `wanted`.
        stop: messages from this one on are not sent.
        begun: how many of the first ones are ahead, in flight or sent.
    """

    peer: int
    job: PullJob
    wanted: tuple[_Wanted, ...]
    future: "Future[int]"
    stop: int
    begun: int = 0
    next: int = 0
    ahead: deque[Fetch] = field(default_factory=deque)
    sending: dict[int, _Sending] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return not self.sending and self.next >= self.stop

    @property
    def num_sent(self) -> int:
        """Number of leading entries that were sent, once the pull is over."""
        if self.stop == len(self.wanted):
            return len(self.job)
        return min(self.wanted[self.stop].index, len(self.job.keys))


class PullSender:
    """The entries that one rank sends for pulls of other nodes.

    Args:
        between: called while pieces are cut, so that the transport continues.

    Attributes:
        serving: pulls that have not ended.
    """

    def __init__(self, tiers: EntryTiers, transport: Transport, *, between: Between) -> None:
        self.serving: list[_Serving] = []
        self._tiers = tiers
        self._transport = transport
        self._between = between

    def serve(self, link: EntryLink, job: PullJob, future: "Future[int]") -> None:
        """Sends entries, or what the link carries of them, to a reader. The future gets the number of leading entries
        that were sent, once none of them is in flight: soon after the first one that is not there or is damaged, or
        after `lost`."""
        wanted = self._wanted(link, job)
        self.serving.append(_Serving(link.peer, job, wanted, future, stop=len(wanted)))

    def drop_root(self, root: bytes) -> None:
        """Sends nothing more of this root."""
        for serving in self.serving:
            if serving.job.root == root:
                self._stop_at(serving, serving.next)

    def lost(self, peer: int) -> None:
        """Sends nothing more to a peer. The caller then has the transport cancel what is in flight."""
        for serving in self.serving:
            if serving.peer == peer:
                self._stop_at(serving, serving.next)

    def holds(self, peer: int) -> bool:
        """Whether anything for that peer is in flight, and so may still be read."""
        return any(serving.sending for serving in self.serving if serving.peer == peer)

    def step(self) -> bool:
        """Advances every pull. Returns whether anything happened."""
        served = [self._advance_serving(serving) for serving in tuple(self.serving)]
        return any(served)

    def close(self) -> None:
        """Unpins everything, once the transport is closed."""
        for serving in self.serving:
            self._stop_at(serving, serving.next)
            for sending in serving.sending.values():
                self._unpin(sending)
        self.serving.clear()

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
        self.serving.remove(serving)
        serving.future.set_result(serving.num_sent)
        return True

    def _send_next(self, serving: _Serving) -> bool:
        """Looks ahead, and sends what is there. Returns whether anything was begun."""
        while len(serving.ahead) < _AHEAD and serving.begun < serving.stop:
            key, _ = serving.wanted[serving.begun].piece
            # An entry that comes from another node may come from this reader, which waits for it too.
            fetch = Fetch(key, done=True) if self._tiers.is_pulling(key) else self._tiers.fetch(key)
            if fetch is None:
                break
            serving.ahead.append(fetch)
            serving.begun += 1
        begun = False
        while serving.ahead and serving.ahead[0].done and len(serving.sending) < IN_FLIGHT:
            fetch = serving.ahead[0]
            if fetch.place is None:
                self._stop_at(serving, serving.next)
                break
            wanted = serving.wanted[serving.next]
            message = self._to_send(wanted, fetch.place.tensor)
            if message is None:
                is_entry = wanted.index < len(serving.job.keys)
                self._tiers.damaged(fetch, state_after=None if is_entry else serving.job.state_after)
                self._stop_at(serving, serving.next)
                break
            serving.ahead.popleft()
            tag = serving.job.number << INDEX_BITS | wanted.index
            request = self._transport.send(serving.peer, tag, message)
            serving.sending[serving.next] = sending = _Sending(fetch if wanted.cut is None else None, message, request)
            if sending.pinned is None:
                self._tiers.release(fetch)
            serving.next += 1
            begun = True
        return begun

    def _wanted(self, link: EntryLink, job: PullJob) -> tuple[_Wanted, ...]:
        layout, first = self._tiers.layout, len(job.keys)
        pieces, cuts = pieces_of(job.keys, job.state_after, layout), cuts_of(layout, link)
        if cuts is None:
            return tuple(_Wanted(index, piece, None, piece[0]) for index, piece in enumerate(pieces))
        wanted = []
        if cuts.entry is not None:
            wanted += [_Wanted(index, piece, cuts.entry, piece[0]) for index, piece in enumerate(pieces[:first])]
        if job.state_after is not None:
            for index, (number, cut) in enumerate(cuts.state, first):
                wanted.append(_Wanted(index, pieces[first + number], cut, job.state_after))
        return tuple(wanted)

    def _to_send(self, wanted: _Wanted, entry: Tensor) -> Tensor | None:
        """The message about an entry. Returns None if a piece must be cut from it, and it is damaged."""
        if wanted.cut is None:
            return entry[: sent_bytes(wanted.piece, entry)]
        message = torch.empty(wanted.cut.message_bytes, dtype=torch.uint8)
        key, _ = wanted.piece
        is_whole = wanted.cut.cut(key, entry, message, named=wanted.named, between=self._between)
        return message if is_whole else None

    def _unpin(self, sent: _Sending) -> None:
        if sent.pinned is not None:
            self._tiers.release(sent.pinned)

    def _stop_at(self, serving: _Serving, index: int) -> None:
        """Sends nothing more; entries from this one on count as not sent."""
        serving.stop = min(serving.stop, index)
        while serving.ahead:
            self._tiers.release(serving.ahead.popleft())


def sent_bytes(piece: Piece, place: Tensor) -> int:
    """Size of a message that has all of a piece: an entry with the rest of its place, or a piece of a state without."""
    form = piece[1][0]
    return form.size if form.part.spec.kind is KVKind.STATE else place.numel()
