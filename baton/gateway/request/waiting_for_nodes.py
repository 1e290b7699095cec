"""New requests that wait because no node serves. When one comes, they go to it in turn, while nodes have places.

Nodes that come a moment later so get their share. Turns go by arrival, whatever the priorities: clients choose those
themselves. Each process of a gateway has turns of its own. Who has a place is decided by whoever made this.
"""

import asyncio
from collections.abc import Callable, Iterator

from baton.gateway.core.request import Request
from baton.gateway.request.connections import Connections

_PAUSE_S = 0.02  # between two rounds: a look at many nodes costs time, and later requests get places in between

Listener = Callable[[], None]


class WaitingForNodes:
    """The new requests of one process that wait for a node.

    Args:
        has_place: whether one more prompt of so many tokens may go to the nodes now. True while no node serves: each
            round of turns then reaches all that wait, as a change of the fleet may mean that none will come.
    """

    def __init__(self, connections: Connections, has_place: Callable[[int], bool]) -> None:
        self._has_place = has_place
        self._waiting: dict[Listener, Request] = {}  # in order of arrival
        self._turns: Iterator[Listener] = iter(())
        self._is_under_way = False  # the next turn is scheduled
        self._pause: asyncio.TimerHandle | None = None
        self._is_due = False  # the fleet has changed since the last round began
        self._full = False
        connections.add_listener(self._fleet_changed)

    @property
    def take_all_places(self) -> bool:
        """Whether some of these have not had their turn or found no place, so that the next ones are theirs."""
        return (self._full or self._is_under_way) and bool(self._waiting)

    def add(self, request: Request, listener: Listener) -> None:
        """Calls `listener` whenever it may be the request's turn."""
        self._waiting[listener] = request

    def discard(self, listener: Listener) -> None:
        self._waiting.pop(listener, None)

    def _fleet_changed(self) -> None:
        self._is_due = bool(self._waiting)
        if not self._is_under_way and self._pause is None:
            self._begin_round()

    def _begin_round(self) -> None:
        self._pause = None
        if self._is_due:
            self._is_due, self._turns = False, iter(tuple(self._waiting))
            self._next_turn()

    def _next_turn(self) -> None:
        self._is_under_way = self._full = False
        loop = asyncio.get_running_loop()
        for listener in self._turns:
            if listener not in self._waiting:
                continue
            if not self._has_place(len(self._waiting[listener].prompt)):
                self._full = True  # until the next round
                break
            listener()
            # Its task sends it to a node before the next one looks for a place.
            loop.call_soon(self._next_turn)
            self._is_under_way = True
            return
        self._pause = loop.call_later(_PAUSE_S, self._begin_round)
