"""One request on its way through the nodes: events in, commands out. Pure: no clock, task or socket.

Chooses a decode node, has a prefill node serve its ticket, passes tokens on in order, and starts over where a node is
lost, so that the client sees every token exactly once.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.commands import Command
from gateway.events import Event
from gateway.router import Wanted
from protos.baton.v1 import common_pb2


class FleetNode(Protocol):
    """What a request needs to know of one node."""

    address: str
    heard_at_s: float
    peers: dict[int, common_pb2.PeerState]

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def model(self) -> tuple[str, ...]: ...

    def note_sent(self, num_tokens: int) -> None: ...


class Fleet(Protocol):
    """The nodes that the gateway knows, as they are at this moment. `gateway.fleet` has the real one, also pure."""

    def pick_decode(self, wanted: Wanted) -> FleetNode | None: ...

    def pick_prefill(self, decode: FleetNode, wanted: Wanted) -> FleetNode | None: ...

    def node(self, address: str) -> FleetNode | None: ...

    def explain(self) -> str: ...


class RequestMachine:
    """One request from its check to its last message.

    `handle` takes all events that are there at once, so that tokens which came together leave in one message.
    """

    def handle(self, events: Sequence[Event], now_s: float) -> list[Command]:
        """Reacts to events in their order. `now_s` never decreases."""
        raise NotImplementedError

    @property
    def deadline_s(self) -> float | None:
        """When `TimePassed` is due: the request's own deadline, or an earlier end of somebody's patience."""
        raise NotImplementedError

    @property
    def waits_for_fleet(self) -> bool:
        """Whether `FleetChanged` could help."""
        raise NotImplementedError
