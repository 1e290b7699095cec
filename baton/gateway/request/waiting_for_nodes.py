"""New requests that wait because no node serves. When one comes, they go to it in turn, while nodes have places.

Nodes that come a moment later so get their share. Who has a place is decided by whoever made this.
"""

import asyncio
from collections.abc import Callable, Iterator

from baton.gateway.core.request import Request
from baton.gateway.request.connections import Connections

Listener = Callable[[], None]


class WaitingForNodes:
    """The new requests of one process that wait for a node.

    Args:
        has_place: whether one more prompt of so many tokens may go to the nodes now. True while no node serves: each
            change of the fleet then reaches all that wait, as it may mean that none will come.
    """

    def __init__(self, connections: Connections, has_place: Callable[[int], bool]) -> None:
        self._has_place = has_place
        self._waiting: dict[Listener, Request] = {}
        self._turns: Iterator[tuple[Listener, Request]] = iter(())
        self._is_under_way = False  # the next turn is scheduled
        self._full = False
        connections.add_listener(self._fleet_changed)

    @property
    def take_all_places(self) -> bool:
        """Whether some of these found no place, so that the next ones are theirs."""
        return self._full and bool(self._waiting)

    def add(self, request: Request, listener: Listener) -> None:
        """Calls `listener` whenever it may be the request's turn."""
        self._waiting[listener] = request

    def discard(self, listener: Listener) -> None:
        self._waiting.pop(listener, None)

    def _fleet_changed(self) -> None:
        self._turns = iter(sorted(self._waiting.items(), key=lambda item: item[1].priority))
        if not self._is_under_way:
            self._next_turn()

    def _next_turn(self) -> None:
        self._is_under_way = self._full = False
        for listener, request in self._turns:
            if listener not in self._waiting:
                continue
            if not self._has_place(len(request.prompt)):
                self._full = True  # until the next report
                return
            listener()
            # Its task sends it to a node before the next one looks for a place.
            asyncio.get_running_loop().call_soon(self._next_turn)
            self._is_under_way = True
            return
