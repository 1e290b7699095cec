"""The process through which the ranks of other hosts reach rank 0.

It is a separate process, so that neither steps nor calls wait for rank 0's Python. Rank 0 starts it through
`baton.node.ranks.child` with the number of an inherited socket. Over that socket it gets its `GateSetup`, and reports
`Joined`, `RankLost` and `Failed`.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection

from baton.core.errors import BatonError, ConfigError, PeerRefused
from baton.core.exits import exit_at_once
from baton.core.logs import set_up_logging
from baton.core.version import __version__
from baton.node.ranks.hosts import Hosts
from baton.node.ranks.messages import Failed, GateSetup, Joined, RankLost
from baton.node.ranks.relay import HANDSHAKE_S, SHUTDOWN_S, Greeting, Stream, relay, set_keepalive
from baton.rpc.server import ListenAddress
from baton.security.peers import PeerTls

log = logging.getLogger("baton")

_EVERYWHERE = ("0.0.0.0", "::")


def main(arguments: Sequence[str]) -> None:
    control = Connection(int(arguments[0]))
    try:
        setup: GateSetup = control.recv()
    except (EOFError, OSError):  # rank 0 is gone
        exit_at_once(1)
    settings = setup.settings
    set_up_logging(settings.log_level, role=setup.program, name=settings.name or "", form=settings.log_format)
    try:
        asyncio.run(Gate(setup, control).serve())
    except ConfigError as error:
        control.send(Failed(error))
    exit_at_once(0)


class Gate:
    """Accepts the connections of other hosts' ranks.

    Args:
        control: the connection to rank 0.
    """

    def __init__(self, setup: GateSetup, control: Connection) -> None:
        self._settings = setup.settings
        self._hosts = Hosts.of(setup.settings)
        self._tls = PeerTls.read(setup.settings, setup.role)
        self._ends = {place: socket.socket(fileno=number) for place, number in setup.ends.items()}
        self._control = control
        self._hosts_of: dict[int, str] = {}
        self._relayed: set[asyncio.Task[None]] = set()
        self._complete = asyncio.Event()

    async def serve(self) -> None:
        """Serves until every rank has joined and every connection has ended.

        Raises:
            ConfigError: the gate cannot listen at the leader's address.
        """
        leader = self._hosts.leader
        assert leader is not None
        try:
            server = await asyncio.start_server(
                self._admit, leader.host.strip("[]") if _is_address(leader) else None, leader.port,
                ssl=self._tls.server, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=SHUTDOWN_S,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"cannot wait for the other hosts at {leader.host}:{leader.port}: {error.strerror or error}",
                field="leader_address", value=f"{leader.host}:{leader.port}",
                cure="the port may be in use, or the address may be another host's",
            ) from None  # fmt: skip
        try:
            await self._complete.wait()
        finally:
            server.close()
            for end in self._ends.values():
                end.close()
        while self._relayed:
            await asyncio.wait(self._relayed)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        remote = Stream(reader, writer)
        try:
            greeting = await self._check(remote)
        except BatonError as error:
            log.warning("refused the host at %s: %s", remote.host, error)
            writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
            await remote.close()
            return
        set_keepalive(remote, within_s=self._settings.keepalive_s)
        writer.write(b"{}\n")
        place = (greeting.rank, greeting.channel)
        local = await Stream.over(self._ends.pop(place))
        task = asyncio.create_task(self._relay(place, local, remote), name=f"relay-{place}")
        self._relayed.add(task)
        task.add_done_callback(self._relayed.discard)
        if not any(rank == greeting.rank for rank, _ in self._ends):
            self._hosts_of[greeting.rank] = remote.host
            self._control.send(Joined(greeting.rank, remote.host))
        if not self._ends:
            self._complete.set()

    async def _check(self, remote: Stream) -> Greeting:
        """Checks a peer's certificate, and only then reads its greeting. Raises PeerRefused if either is wrong."""
        if not self._tls.admits(remote.writer.get_extra_info("peercert")):
            cure = "use a certificate of the node's role"
            raise PeerRefused(f"its certificate is not one of a {self._tls.role}", cure=cure)
        greeting = await Greeting.read(remote.reader)
        ours = Greeting(
            __version__, greeting.rank, greeting.channel, self._settings.tensor_parallel_size, self._hosts.count
        )
        if greeting != ours:
            raise PeerRefused(
                f"host 0 has {ours}, this host has {greeting}", cure="start all hosts with equal settings"
            )
        if (greeting.rank, greeting.channel) not in self._ends:
            raise PeerRefused(
                f"rank {greeting.rank} is connected already, or belongs to host 0",
                field="host_rank",
                cure="give each host its own NODE_RANK, and restart all hosts of a node together",
            )
        return greeting

    async def _relay(self, place: tuple[int, str], local: Stream, remote: Stream) -> None:
        rank, channel = place
        host = remote.host
        why = await relay(local, remote)
        # A rank that ends normally closes its calls first, and its steps together with rank 0.
        if why and (channel == "steps" or not self._complete.is_set()):
            self._control.send(RankLost(rank, host, why))


def _is_address(leader: ListenAddress) -> bool:
    """Whether host 0 listens at this address only. A name may resolve to an address that host 0 does not have."""
    host = leader.host.strip("[]")
    return host not in _EVERYWHERE and (":" in host or host.replace(".", "").isdigit())
