"""The process that calls the client of Mooncake Store, because the client's calls cannot be bounded or interrupted.

Some of them hold the interpreter's lock for more than a minute, and any peer may read and write the memory that the
client is given. `mooncake_process` runs it. It imports nothing that takes long.
"""

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Thread
from time import sleep
from typing import Any

from kvtransfer.transports.ucx_trial import end_with

# What it reports on its control socket, in this order.
REACHED, READY = b"reached", b"ready"
# What it reports in place of one of them; a text follows.
UNUSABLE = b"unusable: "
MESSAGE_BYTES_MAX = 1 << 17

_PROBE_S = 1.0
_PROBE_PAUSE_S = 0.5
_OBJECTS_STAY_WITH_THEIR_OWNERS = "P2PHANDSHAKE"

# A call's keys, and the address and size of the lane's memory, to one code for each key.
_Call = Callable[[list[str], int, int], list[int]]


def main(
    parent: int, control_fd: int, memory_fd: int, lane_bytes: int, host: str, port: int, lane_fds: list[int]
) -> None:
    """Serves until the other end of a lane is closed, or the parent ends.

    Args:
        memory_fd: memory of lane_bytes for each lane, shared with the parent.
    """
    end_with(parent)
    for of_terminal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(of_terminal, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        store: Any = import_module("mooncake.store")
    except ImportError as error:
        control.send(UNUSABLE + str(error).encode()[:1000])
        return
    own_address = wait_for(host, port)
    control.send(REACHED)
    client = store.MooncakeDistributedStore()
    # It gives no memory to the store, and needs no buffer for calls that name memory.
    if client.setup(own_address, _OBJECTS_STAY_WITH_THEIR_OWNERS, 0, 0, "tcp", "", f"{host}:{port}") != 0:
        os._exit(1)
    memory = mmap.mmap(memory_fd, 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if client.register_buffer(address, len(memory)) != 0:
        os._exit(1)
    calls = calls_of(client)
    lanes = [
        Thread(target=serve_lane, args=(socket.socket(fileno=fd), calls, address + number * lane_bytes, lane_bytes))
        for number, fd in enumerate(lane_fds)
    ]
    for lane in lanes:
        lane.start()
    control.send(READY)
    for lane in lanes:
        lane.join()


def wait_for(host: str, port: int) -> str:
    """Waits until the port accepts connections; returns this machine's IPv4 address on the way there.

    The client itself would retry for 90 s and then fail.
    """
    while True:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PROBE_S)
            connection.connect((host, port))
            return str(connection.getsockname()[0])
        sleep(_PROBE_PAUSE_S)


def calls_of(client: Any) -> dict[str, _Call]:
    """The calls by name. `remove` and `remove_matching` do not wait for the leases of readers: these check digests."""
    return {
        "has": lambda keys, _address, _size: client.batch_is_exist(keys),
        "get": lambda keys, address, size: [client.get_into(keys[0], address, size)],
        "put": lambda keys, address, size: [client.put_from(keys[0], address, size)],
        "remove": lambda keys, _address, _size: client.batch_remove(keys, True),
        "remove_matching": lambda keys, _address, _size: [client.remove_by_regex(keys[0], True)],
    }


def serve_lane(lane: socket.socket, calls: dict[str, _Call], address: int, size_bytes: int) -> None:
    """Answers one call after the other; ends the process with the lane."""
    while message := lane.recv(MESSAGE_BYTES_MAX):
        name, keys = json.loads(message)
        lane.send(json.dumps(calls[name](keys, address, size_bytes)).encode())
    os._exit(0)  # without the client's own end, which waits for the store


if __name__ == "__main__":
    _parent, _control, _memory, _lane_bytes = map(int, sys.argv[1:5])
    main(_parent, _control, _memory, _lane_bytes, sys.argv[5], int(sys.argv[6]), [int(fd) for fd in sys.argv[7:]])
