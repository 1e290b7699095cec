"""Checks whether a node grows, or keeps state, after connects that fail and after prefill nodes that are killed.

A decode node and a prefill node on the CPU, without TLS, so that anybody may connect. Unauthenticated peers begin pairs
with both and are refused, abort, cancel, or give made-up addresses (`bench.unauthenticated_peers`). Then prefill nodes
without a model pair with the decode node and are killed after each step of the handshake in turn; each replaces the one
before at its address (`bench.mortal_peer`). At the end the two real nodes pair.
`python -m bench.connects 20000 200` prints the tables for 20,000 connects and 200 kills.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from baton.cli.processes import Process, Processes
from baton.core.regular_file import write_regular_file
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from baton.settings.config import DEMO_MODELS
from bench.mortal_peer import STEPS, live, peers
from bench.table import Row, print_rows
from bench.table import write_markdown as write_table
from bench.unauthenticated_peers import UnauthenticatedDecodePeers, UnauthenticatedPrefillPeers

MODEL = DEMO_MODELS / "llama"
CONNECTS = 100_000
KILLS = 1_000
READINGS = 20
AT_ONCE = 16
KILLED_AT_ONCE = 2
SEED = 7
# Of peers that are gone, a node keeps this many lines when the next one comes.
REMEMBERED = 32
_QUIET_TIMEOUT_S = 300.0
_REPORT_TIMEOUT_S = 300.0
_MIB = 1 << 20
_BAR = 24
_FLAGS = ("--model", str(MODEL), "--device", "cpu", "--kv-cache-mib", "6", "--log-level", "error")


@dataclass(frozen=True)
class Reading:
    """One node at one moment when nothing connects."""

    after: str
    rss_bytes: int
    files: int
    peers: int


@dataclass
class Watched:
    """A node and its readings so far."""

    process: Process
    readings: dict[str, list[Reading]]

    async def read(self, part: str, after: str) -> None:
        status = await quiet(self.process)
        of_process = psutil.Process(self.process.pid)
        reading = Reading(after, of_process.memory_info().rss, of_process.num_fds(), len(status.peers))
        self.readings.setdefault(part, []).append(reading)


def run(progress: Callable[[str], None], connects: int = CONNECTS, kills: int = KILLS) -> Iterator[Row]:
    """The rows of this benchmark: the readings over time, and what happened. If it fails or is stopped, the rows so far
    come first.

    Raises:
        RuntimeError: a node ended, or the two cannot pair at the end.
    """
    rows: list[Row] = []
    failure: BaseException | None = None
    with Processes(progress) as processes:
        prefill = processes.start("prefill_node", _FLAGS)
        decode = processes.start("decode_node", _FLAGS)
        processes.wait_ready([prefill, decode])
        watched = Watched(prefill, {}), Watched(decode, {})
        try:
            rows += asyncio.run(endure(*watched, connects=connects, kills=kills, progress=progress))
        except (RuntimeError, ExceptionGroup, KeyboardInterrupt) as error:
            failure = error
    for each in watched:
        for part, readings in each.readings.items():
            for reading in readings:
                yield Row(f"{each.process.program}, memory", reading.after, reading.rss_bytes / _MIB, "MiB")
                yield Row(f"{each.process.program}, files", reading.after, reading.files, "files")
                yield Row(f"{each.process.program}, peers in the status", reading.after, reading.peers, "peers")
            half = readings[len(readings) // 2]
            grown = (readings[-1].rss_bytes - half.rss_bytes) / _MIB
            yield Row(f"{each.process.program}, growth in the second half of the {part}", "", grown, "MiB")
    yield from rows
    if failure is not None:
        raise failure


async def endure(
    prefill: Watched,
    decode: Watched,
    *,
    connects: int,
    kills: int,
    progress: Callable[[str], None],
    readings: int = READINGS,
) -> list[Row]:
    """Connects and kills; returns what happened.

    Args:
        readings: at even intervals while unauthenticated peers connect, and again while nodes are killed.

    Raises:
        RuntimeError: a node ended, or the two cannot pair at the end.
    """
    info = (await quiet(decode.process)).info
    of_decode = UnauthenticatedPrefillPeers(decode.process.address, info, seed=SEED)
    rows: list[Row] = []
    async with UnauthenticatedDecodePeers(prefill.process.address, info, seed=SEED) as of_prefill:
        turns = [of_decode.one, of_prefill.one]
        share = -(-connects // readings)
        bar = _Bar("connects", connects, progress)
        for start in range(0, connects, share):
            count = min(share, connects - start)
            await many([turns[number % 2] for number in range(count)], AT_ONCE)
            for watched in (prefill, decode):
                _check_alive(watched.process)
                await watched.read("connects", f"{start + count} connects")
            bar.show(start + count)
        for who, peers in (("decode node", of_decode), ("prefill node", of_prefill)):
            rows += [Row(f"connects to the {who}", kind, count, "") for kind, count in sorted(peers.counts.items())]
        await of_decode.close()
    rows += await kill_peers(decode, info, kills, progress, readings)
    rows.append(Row("the two nodes pair afterwards", "", await pairing_s(prefill.process, decode.process), "s"))
    return rows


async def kill_peers(
    decode: Watched, info: node_status_pb2.NodeInfo, kills: int, progress: Callable[[str], None], readings: int
) -> list[Row]:
    """Pairs and kills prefill nodes, `KILLED_AT_ONCE` at a time."""
    context = peers()
    bar = _Bar("kills", kills, progress)

    def one(number: int) -> None:
        peer = node_status_pb2.NodeInfo()
        peer.CopyFrom(info)
        peer.role, peer.name = node_status_pb2.ROLE_PREFILL, f"mortal-{number % KILLED_AT_ONCE}"
        peer.address, peer.incarnation = f"10.0.0.2:{number % KILLED_AT_ONCE + 1}", 1 << 40 | number
        report, theirs = context.Pipe()
        step = STEPS[number // KILLED_AT_ONCE % len(STEPS)]
        process = context.Process(target=live, args=(decode.process.address, peer.SerializeToString(), step, theirs))
        process.start()
        theirs.close()
        with report:
            reached = report.poll(_REPORT_TIMEOUT_S)
        process.kill()
        process.join()
        process.close()
        if not reached:
            raise RuntimeError(f"a prefill node did not get to {step!r} within {_REPORT_TIMEOUT_S:g} s")

    share = -(-kills // readings)
    for start in range(0, kills, share):
        numbers = range(start, min(start + share, kills))
        await many([partial(asyncio.to_thread, one, number) for number in numbers], KILLED_AT_ONCE)
        _check_alive(decode.process)
        await decode.read("kills", f"{numbers.stop} kills")
        bar.show(numbers.stop)
    return [Row("prefill nodes killed", f"after each of {len(STEPS)} steps: {', '.join(STEPS)}", kills, "")]


async def many(calls: Sequence[Callable[[], Awaitable[None]]], at_once: int) -> None:
    """Makes all calls, so many at a time. The first failure cancels the others."""
    waiting = iter(calls)

    async def in_turn() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(in_turn())


async def pairing_s(prefill: Process, decode: Process) -> float:
    """Has the prefill node pair with the decode node; returns the seconds.

    Raises:
        RuntimeError: they do not pair.
    """
    began = time.monotonic()
    async with connect(prefill.address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        state = await stub.Connect(prefill_pb2.ConnectRequest(decode_address=decode.address))
    if state.phase != node_status_pb2.PEER_PHASE_READY:
        raise RuntimeError(f"the two nodes cannot pair: {state}")
    return time.monotonic() - began


async def quiet(node: Process) -> node_status_pb2.NodeStatus:
    """The node's status once no handshake is under way and no file is being closed."""
    deadline = time.monotonic() + _QUIET_TIMEOUT_S
    files, of_process = -1, psutil.Process(node.pid)
    async with connect(node.address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        while True:
            status = await stub.Describe(node_pb2.DescribeRequest())
            busy = any(peer.phase == node_status_pb2.PEER_PHASE_CONNECTING for peer in status.peers)
            files, before = of_process.num_fds(), files
            if not busy and files == before:
                return status
            if time.monotonic() > deadline:
                raise RuntimeError(f"{node.program} still makes pairs after {_QUIET_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.5)


def _check_alive(node: Process) -> None:
    if (code := node.popen.poll()) is not None:
        raise RuntimeError(f"the {node.program} ended with code {code}")


class _Bar:
    """Progress as lines: a bar, a rate, the time left."""

    def __init__(self, what: str, total: int, progress: Callable[[str], None]) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._began_s = time.monotonic()

    def show(self, done: int) -> None:
        rate = done / (time.monotonic() - self._began_s)
        filled = _BAR * done // self._total
        left = f"{rate:.0f} a second, {(self._total - done) / rate:.0f} s left"
        self._progress(f"[{'#' * filled}{'.' * (_BAR - filled)}] {done} of {self._total} {self._what}, {left}")


def write_markdown(title: str, rows: Sequence[Row], path: Path) -> None:
    """A table of the readings, with one line for each moment, before the table of the other rows."""
    moments = [row for row in rows if row.work.endswith((" connects", " kills")) and row.name.split(",")[0] in _NODES]
    write_table(title, [row for row in rows if row not in moments], path)
    names = list(dict.fromkeys(row.name for row in moments))
    figures = {(row.work, row.name): f"{row.measured:.4g} {row.unit}" for row in moments}
    lines = ["", "## Over time", "", f"| after | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    lines += [
        f"| {work} | {' | '.join(figures.get((work, name), '') for name in names)} |"
        for work in dict.fromkeys(row.work for row in moments)
    ]
    write_regular_file(path, path.read_text() + "\n".join(lines) + "\n")


_NODES = ("prefill_node", "decode_node")


def main(arguments: Sequence[str]) -> None:
    counts = [int(argument) for argument in arguments]
    rows: list[Row] = []
    try:
        rows.extend(run(lambda line: print(line, file=sys.stderr, flush=True), *counts))
    finally:
        print_rows("Connects", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
