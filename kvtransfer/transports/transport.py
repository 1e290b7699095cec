"""What carries messages between nodes: the Protocol that every transport fulfils.

Two-sided, tagged, receive on arrival: nothing is posted in advance, a message waits at its sender until the receiver
has probed it and offered memory to it. A transport knows nothing of leases and segments; tags are 64-bit numbers.

Made, used and closed by one thread. After `disconnect` and some `progress`, every request of that peer is done.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.errors import BatonError


@dataclass(frozen=True)
class Arrival:
    """A message taken off the transport's queue: exactly one `receive` or `discard` must follow.

    Attributes:
        peer: whose line it came over.
    """

    peer: int
    tag: int
    num_bytes: int
    handle: object


class Request(Protocol):
    """One message on its way out or in. Its memory belongs to the transport until it is done."""

    @property
    def done(self) -> bool: ...

    def failure(self) -> BatonError | None:
        """Why it failed, None if it did not; for requests that are done."""
        ...


class Transport(Protocol):
    """One node's end of all its links. Peers have numbers, which are this node's own."""

    def listen(self, peer: int) -> bytes:
        """Opens this node's end for one peer: the address to give to that peer's `connect`, and to no other."""
        ...

    def connect(self, peer: int, address: bytes) -> None:
        """Makes the endpoint to a peer that is listened to.

        Raises:
            PeerRefused: that is no address of this transport.
        """
        ...

    def disconnect(self, peer: int) -> None:
        """Closes both ends and cancels the requests; works for peers dead, stopped or gone. Unknown: no-op.

        Other peers do not notice, whatever the peer was doing when it died. Nothing of it arrives any more.
        """
        ...

    def carrier(self, peer: int) -> str:
        """What really moves the bulk of the bytes to and from a connected peer: "cma", "sysv", "posix", "tcp",
        "cuda_ipc", "loopback". The last two take memory of a GPU as it is; the others want the host's."""
        ...

    def send(self, peer: int, tag: int, message: Tensor) -> Request: ...

    def probe(self) -> Arrival | None:
        """The next message that has arrived, from whomever."""
        ...

    def receive(self, arrival: Arrival, into: Tensor) -> Request:
        """Takes a message of a connected peer into memory of exactly its size."""
        ...

    def discard(self, arrival: Arrival) -> None:
        """Takes a message, its peer connected or not, without its bytes; its sender sees it as sent."""
        ...

    def progress(self) -> bool:
        """Moves messages on; whether anything happened."""
        ...

    def arm(self) -> bool:
        """Before a wait on `fileno`: True when it will become readable with the next event, False when there has been
        one already."""
        ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


# Carriers that read and write memory of a GPU where it lies.
REACH_GPU_MEMORY = frozenset({"cuda_ipc", "loopback"})
