"""Messages between transports of one process: for nodes that share a process, and for tests.

It behaves like a network: a message waits at its sender until it is received, and either end may vanish.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from baton.core.errors import BatonError, DataLoss, PeerRefused
from kvtransfer.transports.transport import Arrival

_CLOSED = "the peer's transport is closed"
_CANCELLED = "the link was closed"


class _Message:
    """One message and its sender's request. `lock` is held during the copy, so that the sender's memory stays until the
    copy has ended."""

    def __init__(self, source: "LoopbackTransport", peer: int, tag: int, memory: Tensor) -> None:
        self.source = source
        self.peer = peer  # the sender's number for the receiver
        self.tag = tag
        self.memory = memory
        self.lock = threading.Lock()
        self.done = False
        self._failure: BatonError | None = None

    def failure(self) -> BatonError | None:
        return self._failure

    def take(self, into: Tensor | None) -> BatonError | None:
        """Copies the message and completes it, unless its sender has cancelled it."""
        with self.lock:
            if self.done:
                return self._failure
            if into is not None:
                into.copy_(self.memory)
                if into.is_cuda or self.memory.is_cuda:
                    # The only place where a transfer waits for a GPU: peers of one process are for tests.
                    torch.cuda.current_stream().synchronize()
            self.done = True
        self.source.wake()
        return None

    def fail(self, reason: str) -> None:
        with self.lock:
            if not self.done:
                self._failure = DataLoss(reason)
                self.done = True
        self.source.wake()


class _Reception:
    """A receive. The copy happens in `progress`, so that it can be cancelled before."""

    def __init__(self, peer: int, message: _Message, into: Tensor) -> None:
        self.peer = peer
        self.message = message
        self.into = into
        self.done = False
        self._failure: BatonError | None = None

    def failure(self) -> BatonError | None:
        return self._failure

    def end(self, failure: BatonError | None) -> None:
        self._failure = failure
        self.done = True


@dataclass(eq=False)
class _Link:
    """One transport's end of the link to one peer."""

    transport: "LoopbackTransport"
    peer: int
    own_address: bytes = b""
    peer_address: bytes | None = None


class _Exchange:
    """The links of this process by address, like the ports of a network."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: WeakValueDictionary[bytes, _Link] = WeakValueDictionary()

    def enter(self, link: "_Link") -> bytes:
        with self._lock:
            address = f"loopback:{os.getpid()}:{next(self._numbers)}".encode()
            self._open[address] = link
            return address

    def leave(self, address: bytes) -> None:
        with self._lock:
            self._open.pop(address, None)

    def find(self, address: bytes) -> "_Link | None":
        with self._lock:
            return self._open.get(address)


_EXCHANGE: Final = _Exchange()


class LoopbackTransport:
    """A transport whose peers live in the same process, each in its own thread."""

    def __init__(self) -> None:
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards the event's descriptor and `_closed` against `wake` on other threads.
        self._lock = threading.Lock()
        self._closed = False
        self._inbox: deque[tuple[int, _Message]] = deque()
        self._links: dict[int, _Link] = {}
        self._sent: list[_Message] = []
        self._receptions: deque[_Reception] = deque()

    def listen(self, peer: int) -> bytes:
        assert peer not in self._links
        link = self._links[peer] = _Link(self, peer)
        link.own_address = _EXCHANGE.enter(link)
        return link.own_address

    def connect(self, peer: int, address: bytes) -> None:
        if not address.startswith(f"loopback:{os.getpid()}:".encode()):
            raise PeerRefused(
                "the peer's address is not one of this process's loopback transports",
                field="address",
                value=address[:40],
                cure="start both nodes with the same --transport",
            )
        assert self._links[peer].peer_address is None
        self._links[peer].peer_address = address

    def disconnect(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        _EXCHANGE.leave(link.own_address)
        for message in self._sent:
            if message.peer == peer:
                message.fail(_CANCELLED)
        for reception in self._receptions:
            if reception.peer == peer:
                reception.message.fail(_CANCELLED)
                reception.end(DataLoss(_CANCELLED))
        with self._lock:
            waiting, self._inbox = self._inbox, deque(item for item in self._inbox if item[0] != peer)
        for number, message in waiting:
            if number == peer:
                message.fail(_CLOSED)

    def carrier(self, peer: int) -> str:
        assert peer in self._links
        return "loopback"

    def send(self, peer: int, tag: int, message: Tensor) -> _Message:
        sent = _Message(self, peer, tag, message)
        address = self._links[peer].peer_address
        assert address is not None
        link = _EXCHANGE.find(address)
        if link is None or not link.transport.deliver(link.peer, sent):
            sent.fail(_CLOSED)
        self._sent.append(sent)
        return sent

    def deliver(self, peer: int, message: _Message) -> bool:
        """Called by the sender's thread; False if this transport no longer listens to that peer."""
        with self._lock:
            if self._closed or peer not in self._links:
                return False
            self._inbox.append((peer, message))
            os.eventfd_write(self._event_fd, 1)
            return True

    def wake(self) -> None:
        """Called by a peer's thread when a request of this transport is done."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event_fd, 1)

    def probe(self) -> Arrival | None:
        while self._inbox:
            peer, message = self._inbox.popleft()
            if not message.done:
                return Arrival(peer, message.tag, message.memory.numel(), message)
        return None

    def receive(self, arrival: Arrival, into: Tensor) -> _Reception:
        assert isinstance(arrival.handle, _Message)
        assert arrival.peer in self._links
        reception = _Reception(arrival.peer, arrival.handle, into)
        self._receptions.append(reception)
        return reception

    def discard(self, arrival: Arrival) -> None:
        assert isinstance(arrival.handle, _Message)
        if arrival.peer in self._links:
            arrival.handle.take(None)

    def progress(self) -> bool:
        before = len(self._sent)
        self._sent = [message for message in self._sent if not message.done]
        moved = bool(self._receptions) or len(self._sent) < before
        for reception in self._take_receptions():
            if not reception.done:
                reception.end(reception.message.take(reception.into))
        return moved

    def _take_receptions(self) -> Iterator[_Reception]:
        while self._receptions:
            yield self._receptions.popleft()

    def failures(self) -> Sequence[tuple[int, BatonError]]:
        return ()

    def arm(self) -> bool:
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return True
        return False

    def fileno(self) -> int:
        return self._event_fd

    def close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        with self._lock:
            self._closed = True
            os.close(self._event_fd)
        while self._inbox:
            self._inbox.popleft()[1].fail(_CLOSED)
