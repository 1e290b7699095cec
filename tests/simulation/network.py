"""Processes and their connections: lives that freeze and end, streams that keep order until they break.

A message is copied when it is sent, so no two processes share one. A broken stream loses what is on its way, and its
two ends notice at different times.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol

from google.protobuf.message import Message

from baton.core.errors import BatonError, NoNode
from baton.rpc.error_detail import from_detail, to_detail
from tests.simulation.clock import Action, Clock

OnMessage = Callable[[Any], None]
OnEnd = Callable[[BatonError | None], None]


class Life:
    """One process from its start to its end. Actions that are due while it is frozen run when it continues."""

    def __init__(self, clock: Clock, address: str, incarnation: int) -> None:
        self.address = address
        self.incarnation = incarnation
        self.alive = True
        self._clock = clock
        self._held: list[Action] | None = None

    @property
    def frozen(self) -> bool:
        return self._held is not None

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def run(self, action: Action) -> None:
        if not self.alive:
            return
        if self._held is not None:
            self._held.append(action)
        else:
            action()

    def after(self, delay_s: float, action: Action) -> None:
        self._clock.after(delay_s, partial(self.run, action))

    def freeze(self) -> None:
        if self._held is None:
            self._held = []

    def thaw(self) -> None:
        held, self._held = self._held, None
        for action in held or ():
            self.run(action)


class Server(Protocol):
    """A process that others connect to."""

    life: Life

    def accept(self, kind: str, stream: "Stream") -> tuple[OnMessage, OnEnd]: ...


@dataclass(eq=False, slots=True)
class _End:
    life: Life
    on_message: OnMessage
    on_end: OnEnd
    open: bool = True


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BatonError | None


class Stream:
    """One gRPC call between two processes: messages both ways, each way in order."""

    def __init__(
        self, network: "Network", life: Life, address: str, kind: str, on_message: OnMessage, on_end: OnEnd
    ) -> None:
        self.kind = kind
        self.between = (life.address, address)
        self.broken = False
        self._network = network
        self._address = address
        self._client = _End(life, on_message, on_end)
        self._server: _End | None = None
        self._backlog: list[Message | _Ended] = []  # arrived before the server accepted the stream
        self._arrives_s = [0.0, 0.0]  # the last thing that is on its way to the server, and to the client
        self._post(False, None)

    def has_end_at(self, life: Life) -> bool:
        return self._client.life is life or (self._server is not None and self._server.life is life)

    # ---- the client's side

    def to_server(self, message: Message) -> None:
        if self._client.open:
            self._post(False, _copied(message))

    def cancel(self) -> None:
        """The client cancels. It gets nothing more, and the server is notified."""
        if self._client.open:
            self._client.open = False
            self._post(False, _Ended(None))

    # ---- the server's side

    def to_client(self, message: Message) -> None:
        if self._server is not None and self._server.open:
            self._post(True, _copied(message))

    def finish(self, error: BatonError | None) -> None:
        """The server ends the stream after its last message."""
        if self._server is not None and self._server.open:
            self._server.open = False
            self._post(True, _Ended(None if error is None else from_detail(to_detail(error))))

    # ---- faults

    def break_off(self, reason: str, notice_s: tuple[float, float]) -> None:
        """Loses all messages on their way. Client and server notice after these times."""
        if self.broken:
            return
        self.broken = True
        self._network.forget(self)
        for end, delay_s in zip((self._client, self._server), notice_s, strict=True):
            if end is not None:
                end.life.after(delay_s, partial(self._notice, end, reason))

    def _notice(self, end: _End, reason: str) -> None:
        if end.open:
            end.open = False
            end.on_end(NoNode(reason))

    # ---- on the way

    def _post(self, to_client: bool, item: Message | _Ended | None) -> None:
        """Sends one thing; None opens the stream."""
        if self.broken:
            return
        clock = self._network.clock
        arrives_s = max(self._arrives_s[to_client], clock.now_s + self._network.delay_s())
        self._arrives_s[to_client] = arrives_s
        clock.at(arrives_s, partial(self._arrive, to_client, item))

    def _arrive(self, to_client: bool, item: Message | _Ended | None) -> None:
        if self.broken:
            return
        stalled_s = self._network.stalled_until_s(self.between)
        if stalled_s > self._network.clock.now_s:
            self._network.clock.at(stalled_s, partial(self._arrive, to_client, item))
        elif item is None:
            self._connect()
        elif to_client:
            self._client.life.run(partial(self._deliver, self._client, item))
        elif self._server is None:
            self._backlog.append(item)
        else:
            self._server.life.run(partial(self._deliver, self._server, item))

    def _connect(self) -> None:
        server = self._network.servers.get(self._address)
        if server is None or not server.life.alive:
            self.break_off(f"{self._address} refuses connections", (self._network.delay_s(), 0.0))
        else:
            server.life.run(partial(self._accept, server))

    def _accept(self, server: Server) -> None:
        if self.broken:
            return
        # The server may answer while it accepts.
        self._server = end = _End(server.life, _nothing, _nothing)
        end.on_message, end.on_end = server.accept(self.kind, self)
        backlog, self._backlog = self._backlog, []
        for item in backlog:
            server.life.run(partial(self._deliver, end, item))

    def _deliver(self, end: _End, item: Message | _Ended) -> None:
        if not end.open:
            return
        if isinstance(item, _Ended):
            end.open = False
            if not self._client.open and (self._server is None or not self._server.open):
                self._network.forget(self)
            end.on_end(item.error)
        else:
            end.on_message(item)


@dataclass
class Network:
    """All streams, and the servers that accept connections.

    Attributes:
        slow: factor for all delays.
    """

    clock: Clock
    random: Random
    servers: dict[str, Server] = field(default_factory=dict)
    slow: float = 1.0
    _streams: dict[Stream, None] = field(default_factory=dict)
    _stalled: dict[tuple[str, str], float] = field(default_factory=dict)

    def open(self, life: Life, address: str, kind: str, on_message: OnMessage, on_end: OnEnd) -> Stream:
        stream = Stream(self, life, address, kind, on_message, on_end)
        self._streams[stream] = None
        return stream

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream, None)

    def delay_s(self) -> float:
        """A delay, mostly around a millisecond, sometimes many: messages of different streams arrive in any order."""
        draw = self.random.random()
        return self.slow * (0.0002 + 0.002 * draw if draw < 0.9 else 0.4 * (draw - 0.9))

    def stalled_until_s(self, between: tuple[str, str]) -> float:
        return self._stalled.get(_sorted(between), 0.0)

    # ---- faults

    def stall(self, one: str, other: str, seconds: float) -> None:
        """Delivers nothing between two processes for this time; nothing is lost."""
        self._stalled[_sorted((one, other))] = self.clock.now_s + seconds

    def cut(self, one: str, other: str) -> None:
        """Breaks all streams between two processes."""
        for stream in [*self._streams]:
            if _sorted(stream.between) == _sorted((one, other)):
                stream.break_off(f"the connection of {one} and {other} was cut", (self._notice_s(), self._notice_s()))

    def died(self, life: Life) -> None:
        """Breaks all streams of a process that ended."""
        for stream in [*self._streams]:
            if stream.has_end_at(life):
                stream.break_off(f"{life.address} died", (self._notice_s(), self._notice_s()))

    def _notice_s(self) -> float:
        """How long until a break is noticed: mostly a reset comes at once, sometimes only a timeout shows it."""
        draw = self.random.random()
        return 0.05 * draw if draw < 0.8 else 1.5 * draw


def _copied(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())


def _sorted(between: tuple[str, str]) -> tuple[str, str]:
    one, other = between
    return between if one <= other else (other, one)


def _nothing(_: object) -> None:
    """The default until the server accepts the stream."""
