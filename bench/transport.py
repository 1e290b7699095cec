"""The UCX transport alone, between two processes, over message size: against ucx_perftest over the same lanes, memcpy,
and NIXL's reads of blocks of that size."""

import multiprocessing
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import libucx
import psutil
import torch

from bench import nixl_rival
from bench.table import Row
from kvtransfer.transports.table import open_transport
from kvtransfer.transports.transport import TransferRequest, Transport

KIB, MIB = 1 << 10, 1 << 20
SIZES_KIB = (64, 256, 1024, 4096, 16384, 65536)
# Smaller messages cost more per message than per byte; nodes send larger ones.
GOAL_KIB = 1024
BYTES_PER_ROUND = 512 * MIB
MOST_MESSAGES = 2048
ROUNDS = 3
WINDOW = 3
# As in the transfer thread while messages are in flight.
NAP_S = 20e-6
TIMEOUT_S = 120.0


def run(progress: Callable[[str], None]) -> list[Row]:
    """The best of several rounds for every message size."""
    rows = []
    memcpy = memcpy_gigabytes_per_s()
    for size_kib in SIZES_KIB:
        size = size_kib * KIB
        size_text = f"{size_kib} KiB" if size < MIB else f"{size // MIB} MiB"
        progress(f"transport: messages of {size_text}")
        ours, lanes = transport_gigabytes_per_s(size)
        rivals = {"ucx_perftest": perftest_gigabytes_per_s(size), "memcpy": memcpy}
        if nixl_rival.available():
            with nixl_rival.open_reader(_messages(2 * size, least=2), size) as read:
                rivals["NIXL"] = max(read() for _ in range(1 + ROUNDS))
        for rival, measured in rivals.items():
            goal = 0.8 if rival == "ucx_perftest" and size_kib >= GOAL_KIB else None
            rows.append(Row("transport", f"{size_text} messages over {lanes}", ours, "GB/s", rival, measured, goal))
    return rows


def memcpy_gigabytes_per_s(num_bytes: int = 64 * MIB) -> float:
    """The rate of copying memory that exceeds all caches, with one thread."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return max(num_bytes / _seconds(lambda: target.copy_(source)) for _ in range(10)) / 1e9


def transport_gigabytes_per_s(num_bytes: int, *, slots: int = WINDOW) -> tuple[float, str]:
    """The best round of messages of this size from another process, and the lanes that carried them.

    Args:
        slots: how many messages the memory on either side holds. They take turns, so many of them leave the caches.
    """
    messages = max(slots, _messages(num_bytes, least=4))
    with _sender(num_bytes, messages, slots) as connection:
        transport = open_transport("ucx")
        connection.send(transport.listen(1))
        transport.connect(1, connection.recv())
        lanes = transport.carrier(1)
        memory = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(slots)]
        seconds = []
        for _ in range(1 + ROUNDS):  # the first one maps the buffers
            connection.send("go")
            seconds.append(_seconds(lambda: _receive_all(transport, memory, messages)))
        transport.close()
    return messages * num_bytes / min(seconds[1:]) / 1e9, lanes


def perftest_gigabytes_per_s(num_bytes: int) -> float:
    """ucx_perftest's tagged bandwidth over shared memory. It excludes single-copy lanes, which do not survive the death
    of a peer, so Baton's endpoints do not use them."""
    program = Path(libucx.__file__).parent / "bin" / "ucx_perftest"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {
        "LD_LIBRARY_PATH": str(program.parent.parent / "lib"),
        "UCX_TLS": "sysv,posix,tcp,self",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    server = subprocess.Popen([program, "-p", port], env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait_for_port(psutil.Process(server.pid), int(port))
        count = str(_messages(num_bytes, least=8))
        client = [str(program), "127.0.0.1", "-p", port, "-t", "tag_bw", "-s", str(num_bytes), "-n", count, "-w", "4"]
        output = subprocess.run(
            [*client, "-f", "-v"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    finally:
        server.kill()
        server.wait()
    # Comma-separated: iterations, three latencies, average and overall MiB/s, two message rates.
    fields = output.stdout.strip().splitlines()[-1].split(",")
    return float(fields[5]) * MIB / 1e9


def _messages(num_bytes: int, *, least: int) -> int:
    """Messages of one round."""
    return max(least, min(MOST_MESSAGES, BYTES_PER_ROUND // num_bytes))


def _wait_for_port(server: psutil.Process, port: int) -> None:
    """Waits until the server listens. It does not connect: the server would take the connection for its client."""
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        sockets = server.net_connections("tcp")
        if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets):
            return
        time.sleep(0.01)
    raise TimeoutError("ucx_perftest does not listen")


def _receive_all(transport: Transport, slots: list[torch.Tensor], messages: int) -> None:
    free, receiving, received = deque(slots), list[tuple[TransferRequest, torch.Tensor]](), 0
    while received < messages:
        moved = transport.progress()
        while len(receiving) < WINDOW and (arrival := transport.probe()) is not None:
            moved = True
            slot = free.popleft()
            receiving.append((transport.receive(arrival, slot), slot))
        for item in [item for item in receiving if item[0].done]:
            receiving.remove(item)
            free.append(item[1])
            received += 1
        if not moved:
            time.sleep(NAP_S)


def _send_all(transport: Transport, slots: list[torch.Tensor], messages: int) -> None:
    sending: list[TransferRequest] = []
    for number in range(messages):
        sending.append(transport.send(1, number, slots[number % len(slots)]))
        while len(sending) == WINDOW or (number == messages - 1 and sending):
            if not transport.progress():
                time.sleep(NAP_S)
            sending = [request for request in sending if not request.done]


def _serve(connection: Connection, num_bytes: int, messages: int, slots: int) -> None:
    transport = open_transport("ucx")
    connection.send(transport.listen(1))
    transport.connect(1, connection.recv())
    memory = [torch.full((num_bytes,), index % 256, dtype=torch.uint8) for index in range(slots)]
    while connection.recv() == "go":
        _send_all(transport, memory, messages)
    transport.close()


@contextmanager
def _sender(num_bytes: int, messages: int, slots: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, num_bytes, messages, slots), daemon=True)
    process.start()
    try:
        yield ours
        ours.send("end")
        process.join(TIMEOUT_S)
    finally:
        process.kill()
        process.join()


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
