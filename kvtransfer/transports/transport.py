"""The Protocol of transports, which carry messages between nodes. Two-sided, tagged, receive on arrival.

No receive is posted in advance: a message waits at its sender until the receiver has probed it and offered memory. One
thread makes, uses and closes a transport; after `disconnect` and some `progress`, all requests of that peer are done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.core.errors import BatonError


@dataclass(frozen=True)
class Arrival:
    """A probed message: exactly one `receive` or `discard` must follow.

    Attributes:
        peer: the peer whose link it arrived on.
        tag: 64 bits.
    """

    peer: int
    tag: int
    num_bytes: int
    handle: object


class TransferRequest(Protocol):
    """One message that is being sent or received. Its memory belongs to the transport until it is done."""

    @property
    def done(self) -> bool: ...

    def failure(self) -> BatonError | None:
        """The reason why a finished request failed; None if it succeeded."""
        ...


class Transport(Protocol):
    """One node's end of all its links. Peers are this node's own numbers.

    Only methods with a Raises section raise. Any other failure breaks one link: its requests fail, nothing more
    arrives, and `failures` reports it.
    """

    def listen(self, peer: int) -> bytes:
        """Opens this node's end for one peer; returns the address for this one peer's `connect`.

        Raises:
            DataLoss, Overloaded: it cannot be opened now, and nothing of it stays open.
        """
        ...

    def connect(self, peer: int, address: bytes) -> None:
        """Makes the endpoint to a peer after `listen`.

        Raises:
            PeerRefused: the address is not one of this kind of transport.
            DataLoss: the peer cannot be reached.
        """
        ...

    def disconnect(self, peer: int) -> None:
        """Closes the link and cancels its requests, whether the peer is alive, stopped or dead. Unknown peer: no-op.

        Other peers are not affected. No further message of this peer arrives.
        """
        ...

    def carrier(self, peer: int) -> str:
        """The carrier of most bytes of a connected peer: "cma", "sysv", "posix", "tcp", "cuda_ipc" or "loopback". The
        last two reach GPU memory; the others need host memory.

        Raises:
            DataLoss: the link has no way to move them.
        """
        ...

    def send(self, peer: int, tag: int, message: Tensor) -> TransferRequest: ...

    def probe(self) -> Arrival | None:
        """The next message that has arrived, from any peer."""
        ...

    def receive(self, arrival: Arrival, into: Tensor) -> TransferRequest:
        """Receives a message of a connected peer into memory of exactly its size."""
        ...

    def discard(self, arrival: Arrival) -> None:
        """Drops a message, whether its peer is connected or not; for its sender the message is sent."""
        ...

    def progress(self) -> bool:
        """Advances all messages. Returns whether anything happened."""
        ...

    def failures(self) -> Sequence[tuple[int, BatonError]]:
        """The links that have broken since the last call, each once. The caller disconnects them."""
        ...

    def arm(self) -> bool:
        """Prepares a wait on `fileno`: True if the next event makes it readable, False if an event is pending."""
        ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class AddressProbe(Protocol):
    """Tries addresses that might end the process that connects to them. Used on one event loop."""

    async def check(self, address: bytes) -> None:
        """Returns if `Transport.connect` may have the address.

        Raises:
            PeerRefused: it may not.
            Overloaded: the address cannot be tried now.
        """
        ...

    def close(self) -> None: ...


# Carriers that read and write GPU memory directly.
REACH_GPU_MEMORY = frozenset({"cuda_ipc", "loopback"})
