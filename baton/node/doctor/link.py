"""Measures a link between two processes of this machine over the transport that nodes use: latency, rate, carrier."""

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch
from torch import Tensor

from baton.node.doctor.cures import THROUGH_HOST, cure_for
from baton.node.doctor.verdict import Verdict, fail, ok
from kvtransfer.transports.table import open_transport
from kvtransfer.transports.transport import REACH_GPU_MEMORY, Arrival, TransferRequest, Transport

MIB = 1 << 20
_PEER = 1
_SMALL_BYTES = 64
_LARGE_BYTES = 16 * MIB
_ROUND_TRIPS = 50
_LARGE_ROUND_TRIPS = 8
_TIMEOUT_S = 120.0  # the other process imports torch, which a busy machine does slowly
# As in the transfer thread: on few cores, two ends that poll without a pause starve each other.
_NAP_S = 20e-6
_NO_CURE = "see UCX's own report with UCX_LOG_LEVEL=info"


@dataclass(frozen=True)
class MeasuredLink:
    """A link between two memories of this machine, as measured.

    Attributes:
        carrier: such as "sysv", "cma", "cuda_ipc", "tcp"; with "through host memory" if it does not reach GPU memory.
        round_trip_us: of a small message.
        gigabytes_per_s: of large messages, in one direction.
    """

    carrier: str
    round_trip_us: float
    gigabytes_per_s: float


def check_link(devices: tuple[str, str], *, floor_gigabytes_per_s: float, forks: bool = False) -> Verdict:
    """Measures a link and compares it with the floor.

    Args:
        devices: where the memory of the two ends is, such as "cpu" or "cuda:1".
        forks: whether the other end may be a fork of this process, which saves importing torch a second time: 10 s on a
            busy machine. Not once anything here has used a GPU or UCX, which forks cannot.
    """
    check = f"link {devices[0]} to {devices[1]}"
    try:
        link = measure(devices, forks=forks)
    except Exception as error:  # noqa: BLE001  (a broken installation may raise anything)
        return fail(check, f"{type(error).__name__}: {error}", _NO_CURE)
    found = f"{link.carrier}, {link.gigabytes_per_s:.1f} GB/s, {link.round_trip_us:.0f} us there and back"
    if link.gigabytes_per_s < floor_gigabytes_per_s:
        return fail(check, f"{found}; at least {floor_gigabytes_per_s:g} GB/s is required", cure_for(link.carrier))
    return ok(check, found)


def measure(devices: tuple[str, str], *, forks: bool = False) -> MeasuredLink:
    """Measures a link between two processes. `forks`: as in `check_link`.

    Raises:
        RuntimeError: bytes came back changed, or too late.
    """
    with _echo(devices[1], "fork" if forks else "spawn") as connection:
        transport = open_as_a_node(devices[0])
        try:
            connection.send(transport.listen(_PEER))
            transport.connect(_PEER, _receive_address(connection))
            carrier, device = where_messages_lie(transport, devices[0])
            small_s = _round_trip_s(transport, _SMALL_BYTES, _ROUND_TRIPS, device)
            large_s = _round_trip_s(transport, _LARGE_BYTES, _LARGE_ROUND_TRIPS, device)
        finally:
            transport.close()
        connection.send(None)
    return MeasuredLink(carrier, small_s * 1e6, 2 * _LARGE_BYTES / large_s / 1e9)


def open_as_a_node(device: str) -> Transport:
    """Opens UCX as a node does: after its GPU has been made current and has a context."""
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    return open_transport("ucx", on_gpu=on_gpu)


def where_messages_lie(transport: Transport, device: str) -> tuple[str, str]:
    """The carrier of the bytes, and the device of the messages: a GPU only if the carrier reaches its memory."""
    carrier = transport.carrier(_PEER)
    if device == "cpu" or carrier in REACH_GPU_MEMORY:
        return carrier, device
    return carrier + THROUGH_HOST, "cpu"


def _ready(message: Tensor) -> Tensor:
    """Waits until the message's content is written, because UCX is not ordered after torch's stream."""
    if message.is_cuda:
        torch.cuda.synchronize(message.device)
    return message


def _round_trip_s(transport: Transport, num_bytes: int, count: int, device: str) -> float:
    """Mean seconds of one round trip, after two that do not count."""
    # A repeated pattern: `torch.arange` of 16 MiB took 128 MiB, and most of the time of the whole measurement.
    out = torch.arange(256, dtype=torch.uint8, device=device).repeat(-(-num_bytes // 256))[:num_bytes]
    back = _ready(torch.zeros_like(out))
    _exchange(transport, 2, out, back)
    _ready(back.zero_())
    start_s = time.monotonic()
    _exchange(transport, count, out, back)
    took_s = time.monotonic() - start_s
    if not torch.equal(out, back):
        raise RuntimeError(f"a message of {num_bytes} bytes came back changed")
    return took_s / count


def _exchange(transport: Transport, count: int, out: Tensor, back: Tensor) -> None:
    """Sends a message and receives it again, so many times."""
    for index in range(count):
        sent = transport.send(_PEER, index, out)
        arrival = _until_arrival(transport)
        received = transport.receive(arrival, back)
        _until_done(transport, sent, received)


def _serve(connection: Connection, device: str) -> None:
    """Runs in the other process: sends every message back."""
    torch.set_num_threads(1)
    transport = open_as_a_node(device)
    connection.send(transport.listen(_PEER))
    transport.connect(_PEER, connection.recv())
    _, device = where_messages_lie(transport, device)
    memory = _ready(torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=device))
    while not connection.poll():
        moved = transport.progress()
        arrival = transport.probe()
        if arrival is None:
            if not moved:
                time.sleep(_NAP_S)
            continue
        message = memory[: arrival.num_bytes]
        received = transport.receive(arrival, message)
        _until_done(transport, received)
        _until_done(transport, transport.send(_PEER, arrival.tag, message))
    transport.close()


@contextmanager
def _echo(device: str, start: Literal["fork", "spawn"]) -> Iterator[Connection]:
    get = multiprocessing.get_context
    context = get("fork") if start == "fork" else get("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, device), daemon=True)
    with warnings.catch_warnings():
        # Python warns of forks in a process with threads, here those of libraries, which wait for work.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    try:
        yield ours
        process.join(_TIMEOUT_S)
    finally:
        process.kill()
        process.join()
        ours.close()


def _receive_address(connection: Connection) -> bytes:
    if not connection.poll(_TIMEOUT_S):
        raise RuntimeError(f"the other process did not start within {_TIMEOUT_S:.0f} s")
    address: bytes = connection.recv()
    return address


def _until_arrival(transport: Transport) -> Arrival:
    found: list[Arrival] = []

    def probed() -> bool:
        arrival = transport.probe()
        if arrival is not None:
            found.append(arrival)
        return arrival is not None

    _until(probed, transport)
    return found[0]


def _until_done(transport: Transport, *requests: TransferRequest) -> None:
    _until(lambda: all(request.done for request in requests), transport)


def _until(holds: Callable[[], bool], transport: Transport) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not holds():
        if not transport.progress():
            time.sleep(_NAP_S)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no answer within {_TIMEOUT_S:.0f} s")
