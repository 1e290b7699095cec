"""The gateway's connections to all nodes: finds, watches and pairs nodes, and keeps the fleet up to date."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self

from numpy.random import default_rng

from baton.core.errors import BatonError, ConfigError, Draining
from baton.core.types import LocalPolicy
from baton.gateway.fleet.connect_pace import ConnectPace
from baton.gateway.fleet.discovery.directory import Directory
from baton.gateway.fleet.discovery.sources import parse_places
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.gateway.fleet.node_table import ChangeRole, DropSession, FleetCommand, LogLine
from baton.gateway.fleet.watch_pace import WatchPace
from baton.gateway.request.confirming import keep_confirming
from baton.gateway.request.node_clients import NodeClient
from baton.gateway.request.node_watch import WatchCallbacks
from baton.gateway.request.pairing import ConnectNodes, Pairing, PairingCommand
from baton.gateway.text.model import ServedModel
from baton.protos.internal.v1 import node_pb2
from baton.protos.v1 import node_status_pb2
from baton.security import roles as certified
from baton.security.tls import InternalTls
from baton.settings.gateway_config import GatewaySettings

log = logging.getLogger("baton")

_PAIR_CHECK_S = 0.2
_SETTLE_TIMEOUT_S = 5.0

_PREFILL, _DECODE = node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE
_CERTIFIED = {_PREFILL: certified.Role.PREFILL, _DECODE: certified.Role.DECODE}

Listed = dict[Role, frozenset[str]]


@dataclass(eq=False)
class _Member:
    """A listed node.

    Attributes:
        role: role in which the node is reached; at first the role of its list.
    """

    address: str
    role: Role


class Connections:
    """Connections to all nodes. An async context manager: inside it, nodes are found, watched and paired.

    Raises:
        ConfigError: an address is malformed, no decode node is configured, or a Service is given without a cluster.
    """

    def __init__(self, settings: GatewaySettings, model: ServedModel) -> None:
        prefill = parse_places(settings.prefill, field="prefill")
        decode = parse_places(settings.decode, field="decode")
        if not model.generates and not prefill:
            cure = "give host:port of at least one prefill node, or the Service of all prefill nodes"
            why = f"BATON_PREFILL (--prefill) is empty, and {model.name} only makes embeddings or scores"
            raise ConfigError(why, field="prefill", cure=cure)
        if not decode and model.generates:
            cure = "give host:port of at least one decode node, or the Service of all decode nodes"
            raise ConfigError("BATON_DECODE (--decode) is empty", field="decode", cure=cure)
        if not prefill and settings.local_policy is LocalPolicy.STRICT:
            cure = "give prefill nodes, or another local policy"
            raise ConfigError("BATON_PREFILL (--prefill) is empty under policy strict", field="prefill", cure=cure)
        random = default_rng()
        self.fleet = Fleet(
            model.identity,
            model.max_context_tokens,
            settings.local_policy,
            generates=model.generates,
            random=random,
        )
        self._wants_prefill = bool(prefill) and bool(decode) and settings.local_policy is not LocalPolicy.LOCAL
        tls = InternalTls.read(settings, certified.Role.GATEWAY)
        # A peer is accepted only in a role that its certificate allows.
        self._dials = {role: None if tls is None else tls.to_role(named) for role, named in _CERTIFIED.items()}
        self._keepalive_s = settings.keepalive_s
        self._pace, self._watch_pace = ConnectPace(), WatchPace()
        self._resolve_s = settings.resolve_s
        self._listing_changed = asyncio.Event()
        places = {_PREFILL: prefill, _DECODE: decode}
        self._directories = {role: Directory(each, self._listing_changed.set) for role, each in places.items()}
        self._clients: dict[Role, dict[str, NodeClient]] = {_PREFILL: {}, _DECODE: {}}  # by address
        self._members: dict[Role, dict[str, _Member]] = {_PREFILL: {}, _DECODE: {}}  # by list and address
        self._watches: dict[NodeClient, asyncio.Task[None]] = {}
        self._pairing = Pairing(self.fleet, settings.link_retry_s, random)
        self._listeners: set[Callable[[], None]] = set()
        self._tasks = asyncio.TaskGroup()
        # Tasks run in this context: a reconnection may be started from inside a request, but does not belong to it.
        self._context = copy_context()
        self._open = AsyncExitStack()
        self._upkeep: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for directory in self._directories.values():
                await stack.enter_async_context(directory)
            listed = await self._look_up()
            self._open = stack.pop_all()
        self._upkeep = asyncio.create_task(self._keep_up(listed), name="connections")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._upkeep is not None
        self._watches.clear()  # ignores late messages
        self._upkeep.cancel()
        await asyncio.wait([self._upkeep])
        await self._open.aclose()
        await asyncio.gather(*(client.close() for clients in self._clients.values() for client in clients.values()))

    @property
    def upkeep(self) -> "asyncio.Task[None]":
        """The task that keeps the fleet up to date. It ends only with an error."""
        assert self._upkeep is not None
        return self._upkeep

    def clients(self) -> Mapping[str, NodeClient]:
        """The connections to all nodes by address."""
        return {**self._clients[_PREFILL], **self._clients[_DECODE]}

    # ---- for requests

    def client(self, role: Role, address: str) -> NodeClient | None:
        """The connection to a node. Returns None if the node was removed or has another role now."""
        return self._clients[role].get(address)

    def lose(self, role: Role, address: str, reason: str) -> None:
        """Marks a silent node as lost and reconnects. The node gets no requests until its next status."""
        client = self._clients[role].get(address)
        if client in self._watches:
            self._lost(role, address, reason)
            client.watch.end()

    # ---- waiting for nodes

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever a node is added, removed, or reports something new."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the fleet fulfils the condition."""
        changed = asyncio.Event()
        self.add_listener(changed.set)
        try:
            while not condition():
                changed.clear()
                await changed.wait()
        finally:
            self.remove_listener(changed.set)

    async def until_serves(self) -> None:
        """Waits until a request can be served, then a few seconds more, so that all nodes share the first load."""
        await self.until(self.fleet.serves)
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                await self.until(self._settled)
        except TimeoutError:
            return

    def _settled(self) -> bool:
        reachable = all(node.reachable for node in self.fleet.nodes())
        return reachable and (not self._wants_prefill or self._pairing.settled())

    # ---- finding nodes

    async def _keep_up(self, listed: Listed) -> None:
        async with self._tasks as tasks:
            tasks.create_task(self._keep_pairing(), name="pairing")
            tasks.create_task(keep_confirming(self.fleet, self._watch_pace, self._confirm), name="confirming")
            while True:
                await self._follow_directory(listed)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._resolve_s):
                        await self._listing_changed.wait()
                self._listing_changed.clear()
                listed = await self._look_up()

    async def _look_up(self) -> Listed:
        found = await asyncio.gather(*(directory.look_up() for directory in self._directories.values()))
        return dict(zip(self._directories, found, strict=True))

    async def _follow_directory(self, listed: Listed) -> None:
        """Connects to new nodes; drops nodes that are no longer listed, once their requests are done."""
        self._watch_pace.num_nodes = sum(map(len, listed.values()))
        for known in (client for clients in self._clients.values() for client in clients.values()):
            known.watch.follow_pace()
        for role, addresses in listed.items():
            members = self._members[role]
            for address in addresses - members.keys():
                if address not in self._clients[role]:  # else a node of the other list has this role now
                    self._add(role, address)
                    await asyncio.sleep(0)  # creating a connection takes 2 ms, and a list may have thousands of nodes
            for address, member in list(members.items()):
                client = self._clients[member.role][address]
                node = self.fleet.node(member.role, address)
                node.retired = address not in addresses
                if node.retired and not client.busy:
                    del members[address]
                    await self._remove(member, client)

    def _add(self, role: Role, address: str) -> None:
        self.fleet.add(role, address)
        self._members[role][address] = _Member(address, role)
        self._open_client(role, address)

    def _open_client(self, role: Role, address: str) -> None:
        def current() -> bool:
            """Whether this is still the connection to the node; messages of an old connection are ignored."""
            return self._clients[role].get(address) is client and client in self._watches

        def status(message: node_status_pb2.NodeStatus) -> None:
            if current():
                self._status_received(role, address, message)

        def lost(reason: str) -> None:
            if current():
                self._lost(role, address, reason)

        def silent() -> None:
            if current():
                self.fleet.silent(role, address)
                self._notify()

        def cache(batch: node_pb2.WatchCacheResponse) -> bool:
            return not current() or self.fleet.cache_changed(role, address, batch)

        def on_message() -> None:
            if current():
                self.fleet.message_received(role, address, self._now_s())

        callbacks = WatchCallbacks(status, lost, cache, silent)
        client = NodeClient(
            address,
            callbacks,
            on_message,
            keepalive_s=self._keepalive_s,
            dial=self._dials[role],
            pace=self._pace,
            watch_pace=self._watch_pace,
        )
        self._clients[role][address] = client
        self._watches[client] = self._tasks.create_task(
            client.watch.run(), name=f"watch-{address}", context=self._context.copy()
        )

    def _change_role(self, change: ChangeRole) -> None:
        client = self._clients[change.old].pop(change.address)
        (member,) = (
            member
            for members in self._members.values()
            if (member := members.get(change.address)) is not None and member.role == change.old
        )
        member.role = change.new
        self._watches.pop(client).cancel()
        ended = Draining("the node has changed its role", cure="another node is tried")
        self._tasks.create_task(client.retire(ended), name="retire", context=self._context.copy())
        self._open_client(change.new, change.address)

    async def _remove(self, member: _Member, client: NodeClient) -> None:
        # Messages that arrive until the watch has ended are ignored.
        watch = self._watches.pop(client)
        watch.cancel()
        await asyncio.wait([watch])
        del self._clients[member.role][member.address]
        self.fleet.remove(member.role, member.address, self._now_s())
        await client.close()

    # ---- what nodes send

    def _status_received(self, role: Role, address: str, status: node_status_pb2.NodeStatus) -> None:
        self._execute(self.fleet.status_received(role, address, status, self._now_s()))
        self._notify()

    def _lost(self, role: Role, address: str, reason: str) -> None:
        self._execute(self.fleet.lost(role, address, reason, self._now_s()))
        self._notify()

    def _execute(self, commands: Iterable[FleetCommand | PairingCommand]) -> None:
        for command in commands:
            match command:
                case LogLine(text, warning):
                    log.log(logging.WARNING if warning else logging.INFO, "%s", text)
                case DropSession(role, address, reason):
                    self._clients[role][address].drop_session(reason)
                case ChangeRole():
                    self._change_role(command)
                case ConnectNodes():
                    self._tasks.create_task(self._connect(command), name="connect")

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    # ---- pairs

    async def _keep_pairing(self) -> None:
        while True:
            self._execute(self._pairing.check(self._now_s()))
            await asyncio.sleep(_PAIR_CHECK_S)

    async def _connect(self, connect: ConnectNodes) -> None:
        client = self._clients[_PREFILL].get(connect.prefill_address)
        if client is None:
            return  # removed since the pairing asked for it
        node = self.fleet.node(_PREFILL, connect.prefill_address)
        try:
            state = await client.connect_to(connect.decode_address)
        except BatonError as error:
            self._execute(self._pairing.failed(connect.pair, error, self._now_s()))
        else:
            node.take_peer(state)
            self._execute(self._pairing.answered(connect.pair, state, self._now_s()))
            self._notify()

    # ----

    async def _confirm(self, node: FleetNode) -> None:
        client = self._clients[node.role].get(node.address)
        if client is None:
            return
        with suppress(BatonError):  # the Watch stream finds a node that is lost
            node.take_description(await client.describe(), self._now_s())
            self._notify()

    def _now_s(self) -> float:
        return monotonic()
