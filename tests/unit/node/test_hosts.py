"""The hosts of one node: which ones belong to it, and which connections its gate accepts."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import BatonError, ConfigError
from baton.core.version import __version__
from baton.node.fault import Fault
from baton.node.ranks import host, worker_handle
from baton.node.ranks.gate import Gate
from baton.node.ranks.host import await_drain, explain_end, why_no_answer
from baton.node.ranks.hosts import Hosts
from baton.node.ranks.join import serve_store
from baton.node.ranks.messages import CHANNELS, GateSetup, Joined, Meeting, RankLost, Setup, Up
from baton.node.ranks.relay import Greeting, read_line
from baton.node.ranks.worker import receive_setup
from baton.node.ranks.worker_handle import Worker, wait_for_ranks
from baton.security.certificates import write_set
from baton.security.peers import PeerTls
from baton.security.roles import Role
from baton.settings.node_config import DecodeSettings
from baton.settings.reader import hosts_of


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "a"}, {}),
        (
            {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "set-0.set.baton"},
            {"num_hosts": "2", "host_rank": "1", "leader_address": "set-0.set.baton:7004"},
        ),
        (
            {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            {"num_hosts": "4", "host_rank": "3", "leader_address": "10.0.0.1:29500"},
        ),
        ({"NNODES": "2", "NODE_RANK": "1"}, {"num_hosts": "2", "host_rank": "1"}),
        ({"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "NNODES": "1"}, {}),
    ],
)  # fmt: skip
def test_hosts_are_found_in_the_environment(environ: Mapping[str, str], expected: Mapping[str, str]) -> None:
    assert hosts_of(environ) == expected


def settings(**fields: Any) -> DecodeSettings:
    return DecodeSettings.model_validate(
        {"tensor_parallel_size": 4, "num_hosts": 2, "leader_address": "127.0.0.1:7004"} | fields
    )


def test_each_host_has_as_many_ranks() -> None:
    hosts = Hosts.of(settings(host_rank=1))
    assert (hosts.local, hosts.remote) == (range(2, 4), range(2, 4))
    assert Hosts.of(settings()).local == range(2)
    assert Hosts.of(settings(num_hosts=1)).remote == range(4, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host_rank": 2}, "NODE_RANK or LWS_WORKER_INDEX is 2, but there are 2 hosts"),
        ({"tensor_parallel_size": 3}, "equal numbers"),
        ({"leader_address": None}, "MASTER_ADDR or LWS_LEADER_ADDRESS is None"),
        ({"leader_address": "here:0"}, "free port"),
        ({"leader_address": "here"}, "leader_address"),
    ],
)
def test_hosts_that_make_no_node_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Hosts.of(settings(**fields))


def test_hosts_need_certificates() -> None:
    with pytest.raises(ConfigError, match="BATON_TLS_CERT"):
        PeerTls.read(settings(), Role.DECODE)


def test_a_rank_whose_leader_is_gone_ends_without_a_word() -> None:
    """While it starts, too: then its answer finds nobody."""
    leader, rank = Pipe()
    leader.send(Setup(settings(), "decode_node", 1, Meeting(None)))
    leader.close()
    with pytest.raises(EOFError):
        receive_setup(rank)


def test_a_leader_waits_for_a_rank_for_a_bounded_time() -> None:
    workers = [Worker(rank, None, socket.socket(), Pipe()[0]) for rank in (1, 2)]
    workers[0].answers.put(Up())
    with pytest.raises(ConfigError, match="rank 2 of another host did not connect within 0 s"):
        wait_for_ranks(workers, within_s=0.0)
    for worker in workers:
        worker.calls.close()


def test_a_leader_does_not_wait_for_its_own_name() -> None:
    """In Kubernetes it has an address some time after the process starts."""
    store, meeting = serve_store("leader.invalid")
    assert store is not None
    assert (meeting.host, meeting.port > 0) == ("leader.invalid", True)


def test_a_host_that_waits_says_for_what() -> None:
    assert why_no_answer(TimeoutError()) == "it accepts connections but does not answer"
    assert why_no_answer(ConnectionRefusedError("refused")) == "refused"


async def ended(code: int, *, after_turns: int) -> int:
    for _ in range(after_turns):
        await asyncio.sleep(0)
    return code


async def ended_never() -> int:
    await asyncio.Event().wait()
    return 0


async def closed(why: str) -> str:
    return why


@pytest.mark.parametrize(
    ("codes", "why", "expected"),
    [
        ([-9, 0], "", "rank 2 was ended by SIGKILL"),
        ([0, 1], "", "rank 3 ended with exit code 1"),
        ([1, 1], "it closed the connection", "host 0 is gone (it closed the connection)"),
        ([0, 0], "it closed the connection", "host 0 has ended"),
    ],
)
async def test_a_host_says_what_ended_first(
    codes: list[int], why: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank's connections break before its end is known."""
    caplog.set_level("INFO", "baton")
    waits = {asyncio.create_task(ended(code, after_turns=9)): rank for rank, code in enumerate(codes, start=2)}
    carried = [asyncio.create_task(closed(why))]
    await asyncio.wait(carried)
    assert await explain_end(waits, carried, within_s=60.0) == (0 if codes == [0, 0] else 1)
    assert expected in caplog.text


@pytest.mark.parametrize("why", ["it closed the connection", ""])
async def test_ranks_that_do_not_end_by_themselves_are_not_waited_for_beyond_the_limit(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that load do not: all processes of a node whose start fails are gone within 5 s."""
    loads = asyncio.create_task(ended_never())
    carried = [asyncio.create_task(closed(why))]
    await asyncio.wait(carried)
    assert await explain_end({loads: 2}, carried, within_s=0.0) == 1
    assert "host 0 is gone" in caplog.text
    loads.cancel()


async def test_a_host_that_waits_for_a_drain_ends_before_its_pod_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the drain and the one for the ranks have one limit together, from the signal on."""
    hangs, over = asyncio.create_task(ended_never()), asyncio.create_task(closed(""))
    assert await await_drain([hangs, over], grace_s=600.0) == host._END_S
    monkeypatch.setattr(host, "_END_S", 0.01)
    assert await await_drain([hangs], grace_s=0.0) == 0.0
    hangs.cancel()


def test_a_rank_that_left_a_process_with_its_connection_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended, and so must the node, whatever a plug-in of it has started."""
    monkeypatch.setattr(worker_handle, "_READ_S", 3600.0)
    monkeypatch.setattr(worker_handle, "_SILENT_S", 0.01)
    ours, left_open = Pipe()
    with socket.socket() as calls, ours, left_open:
        worker = Worker(1, None, calls, ours)
        worker.wait_drained()
        assert not worker.drained.is_set()


def test_what_a_rank_has_sent_is_waited_for_however_late_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_handle, "_READ_S", 3600.0)
    monkeypatch.setattr(worker_handle, "_SILENT_S", 0.0)
    ours, theirs = Pipe()
    faults: list[Fault] = []
    with socket.socket() as calls, ours:
        worker = Worker(1, None, calls, ours)
        theirs.send(Fault("it has failed"))
        theirs.close()
        waiting = threading.Thread(target=worker.wait_drained)
        waiting.start()
        worker.receive_all(faults.append)
        waiting.join()
    assert [fault.reason for fault in faults] == ["it has failed"]
    assert worker.drained.is_set()


# ---- the gate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    write_set(folder, hosts=["127.0.0.1"], days=1)
    return folder


def of_role(certificates: Path, role: str, port: int) -> DecodeSettings:
    names = {"tls_cert": f"{role}.crt", "tls_key": f"{role}.key", "tls_ca": "ca.crt"}
    files = {field: certificates / name for field, name in names.items()}
    return settings(tensor_parallel_size=2, leader_address=f"127.0.0.1:{port}", **files)


@asynccontextmanager
async def open_gate(certificates: Path, port: int) -> AsyncIterator[tuple[dict[str, socket.socket], Connection]]:
    """This process's ends of rank 1's connections, and of the control connection."""
    ours, theirs = {}, {}
    for channel in CHANNELS:
        ours[channel], end = socket.socketpair()
        theirs[1, channel] = end.detach()
    control, its_control = Pipe()
    setup = GateSetup(of_role(certificates, "decode", port), "decode_node", Role.DECODE, theirs)
    serving = asyncio.create_task(Gate(setup, its_control).serve())
    try:
        yield ours, control
    finally:
        for end in ours.values():
            end.close()
        serving.cancel()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})


@asynccontextmanager
async def greet(
    tls: PeerTls | None, port: int, greeting: bytes
) -> AsyncIterator[tuple[dict[str, object], asyncio.StreamWriter]]:
    while True:
        try:
            name = None if tls is None else Role.DECODE + ".baton"
            context = None if tls is None else tls.client
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
            break
        except ConnectionRefusedError:  # it does not listen yet
            await asyncio.sleep(0.01)
    writer.write(greeting)
    try:
        yield await read_line(reader), writer
    finally:
        writer.transport.abort()


@pytest.fixture
def port() -> Iterator[int]:
    """A port for a gate. No other process gets it, because this one has it, too."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gate's own socket has it
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


GREETING = Greeting(__version__, 1, "calls", 2, 2)


async def test_a_gate_carries_a_rank_until_its_host_is_gone(certificates: Path, port: int) -> None:
    tls = PeerTls.read(of_role(certificates, "decode", port), Role.DECODE)
    calls, steps = (greet(tls, port, replace(GREETING, channel=channel).to_line()) for channel in CHANNELS)
    async with open_gate(certificates, port) as (ends, control), calls as (first, _), steps as (second, writer):
        assert first == second == {}
        assert isinstance(await asyncio.to_thread(control.recv), Joined)
        writer.write(b"step")
        assert await asyncio.to_thread(ends["steps"].recv, 4) == b"step"
        writer.transport.abort()
        assert isinstance(await asyncio.to_thread(control.recv), RankLost)
        assert await asyncio.to_thread(ends["steps"].recv, 4) == b""


@pytest.mark.parametrize(
    "greeting",
    [
        b"not json\n", b"[]\n", b"{}\n", b"{" + b"x" * 100_000 + b"\n", replace(GREETING, rank=0).to_line(),
        replace(GREETING, channel="other").to_line(), replace(GREETING, ranks=4).to_line(),
        replace(GREETING, version="0").to_line(), GREETING.to_line().replace(b"1", b"true", 1),
    ],
)  # fmt: skip
async def test_a_gate_refuses_what_is_no_rank_of_its_node(certificates: Path, port: int, greeting: bytes) -> None:
    tls = PeerTls.read(of_role(certificates, "decode", port), Role.DECODE)
    async with open_gate(certificates, port), greet(tls, port, greeting) as (answer, _):
        assert "error" in answer


@pytest.mark.parametrize("role", ["prefill", "gateway", "operator", None])
async def test_a_gate_reads_nothing_from_unauthenticated_peers(certificates: Path, port: int, role: str | None) -> None:
    tls = None if role is None else PeerTls.read(of_role(certificates, role, port), Role(role))
    async with open_gate(certificates, port):
        try:
            async with greet(tls, port, GREETING.to_line()) as (answer, _):
                assert "certificate" in str(answer["error"])
        except (BatonError, ssl.SSLError, ConnectionError):
            assert role is None, "without TLS the gate closes the connection"
