"""How fast NIXL reads scattered blocks of another process's memory into scattered places of its own.

This is the work of a KV transfer between two paged caches, done by the library that other systems use. The package is
optional: without it there is no row.
"""

import importlib
import importlib.util
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

PACKAGE = "nixl_cu13"
GIGA = 1e9
_TIMEOUT_S = 30.0
_CPU = ("cpu", "cpu")


def available() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


@contextmanager
def open_reader(num_blocks: int, block_bytes: int, devices: tuple[str, str] = _CPU) -> Iterator[Callable[[], float]]:
    """Yields a function that reads all blocks once by prepared descriptors, scattered on both sides, and returns GB/s.
    Every read checks that the other process's bytes arrived.

    Between reads both processes are stopped, because each has a thread that occupies a core.

    NOTE: both ends have their own processes: in one process with our UCX, NIXL reached a third of its speed.

    Args:
        devices: of the memory that is read, and of the reader's memory.
    """
    context = multiprocessing.get_context("spawn")
    to_reader, from_owner = context.Pipe()
    ours, reader = context.Pipe()
    work = (num_blocks, block_bytes)
    processes = [
        context.Process(target=_own, args=(to_reader, *work, devices[0]), daemon=True),
        context.Process(target=_read, args=(from_owner, reader, *work, devices[1]), daemon=True),
    ]
    for process in processes:
        process.start()
    reader.close()  # otherwise the end of the process would not close the pipe

    def signal_all(number: signal.Signals) -> None:
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def read() -> float:
        signal_all(signal.SIGCONT)
        ours.send("read")
        if not ours.poll(2 * _TIMEOUT_S):
            raise TimeoutError("NIXL's processes do not respond")
        seconds: float = ours.recv()
        signal_all(signal.SIGSTOP)
        return num_blocks * block_bytes / seconds / GIGA

    try:
        read()  # connects
        yield read
    finally:
        for process in processes:
            process.kill()
            process.join()


def _read(owner: Connection, orders: Connection, num_blocks: int, block_bytes: int, device: str) -> None:
    torch.set_num_threads(1)
    metadata, address, owners_device = owner.recv()
    agent, memory = _agent("reader", num_blocks * block_bytes, device)
    remote = agent.add_remote_agent(metadata)
    places = _places(memory.data_ptr(), num_blocks, block_bytes, device, seed=1)
    sources = _places(address, num_blocks, block_bytes, owners_device, seed=2)
    handle = agent.initialize_xfer(
        "READ", agent.get_xfer_descs(places, _kind(device)), agent.get_xfer_descs(sources, _kind(owners_device)), remote
    )
    while orders.recv() == "read":
        memory.zero_()
        if memory.is_cuda:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - start_s < _TIMEOUT_S:
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start_s
        if state != "DONE" or not bool((memory == 1).all()):
            raise RuntimeError(f"NIXL's read ended as {state}")
        orders.send(seconds)


def _own(connection: Connection, num_blocks: int, block_bytes: int, device: str) -> None:
    agent, memory = _agent("owner", num_blocks * block_bytes, device)
    memory.fill_(1)
    if memory.is_cuda:
        torch.cuda.synchronize()
    connection.send((agent.get_agent_metadata(), memory.data_ptr(), device))
    connection.recv()


def _agent(name: str, num_bytes: int, device: str) -> tuple[Any, torch.Tensor]:
    """An agent, and the memory that it has registered."""
    if device != "cpu":
        torch.cuda.set_device(device)
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)  # creates the context that UCX needs
    api: Any = importlib.import_module(f"{PACKAGE}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.data_ptr(), num_bytes, _index(device), "")], _kind(device))
    return agent, memory


def _kind(device: str) -> str:
    return "DRAM" if device == "cpu" else "VRAM"


def _index(device: str) -> int:
    return torch.device(device).index or 0


def _places(address: int, num_blocks: int, block_bytes: int, device: str, *, seed: int) -> list[tuple[int, int, int]]:
    order = list(range(num_blocks))
    random.Random(seed).shuffle(order)
    return [(address + index * block_bytes, block_bytes, _index(device)) for index in order]
