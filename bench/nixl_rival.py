"""How fast NIXL reads scattered blocks of another process's memory into scattered places of its own.

The same work as a transfer of paged KV between two caches, by the library that other systems use for it. The package is
optional: without it there is no row.
"""

import importlib
import importlib.util
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

PACKAGE = "nixl_cu13"
GIGA = 1e9
_ROUNDS = 8
_TIMEOUT_S = 30.0


def available() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def read_gigabytes_per_s(num_blocks: int, block_bytes: int) -> float:
    """The best of some reads of as many blocks, scattered on both sides, by prepared descriptors. Every read is checked
    to have brought the other process's bytes.

    NOTE: both ends are processes of their own: beside our UCX in one process NIXL's reached a third of its speed.
    """
    context = multiprocessing.get_context("spawn")
    to_reader, from_owner = context.Pipe()
    ours, result = context.Pipe(duplex=False)
    work = (num_blocks, block_bytes)
    processes = [
        context.Process(target=_own, args=(to_reader, *work), daemon=True),
        context.Process(target=_read, args=(from_owner, result, *work), daemon=True),
    ]
    for process in processes:
        process.start()
    result.close()
    try:
        gigabytes_per_s: float = ours.recv()
        return gigabytes_per_s
    finally:
        for process in processes:
            process.kill()
            process.join()


def _read(owner: Connection, result: Connection, num_blocks: int, block_bytes: int) -> None:
    torch.set_num_threads(1)
    metadata, address = owner.recv()
    agent, memory = _agent("reader", num_blocks * block_bytes)
    remote = agent.add_remote_agent(metadata)
    places = _places(memory.data_ptr(), num_blocks, block_bytes, seed=1)
    sources = _places(address, num_blocks, block_bytes, seed=2)
    handle = agent.initialize_xfer(
        "READ", agent.get_xfer_descs(places, "DRAM"), agent.get_xfer_descs(sources, "DRAM"), remote
    )
    seconds = []
    for _ in range(_ROUNDS):
        memory.zero_()
        start_s = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - start_s < _TIMEOUT_S:
            state = agent.check_xfer_state(handle)
        seconds.append(time.perf_counter() - start_s)
        if state != "DONE" or not bool((memory == 1).all()):
            raise RuntimeError(f"NIXL's read ended as {state}")
    result.send(num_blocks * block_bytes / min(seconds) / GIGA)
    agent.release_xfer_handle(handle)


def _own(connection: Connection, num_blocks: int, block_bytes: int) -> None:
    agent, memory = _agent("owner", num_blocks * block_bytes)
    memory.fill_(1)
    connection.send((agent.get_agent_metadata(), memory.data_ptr()))
    connection.recv()


def _agent(name: str, num_bytes: int) -> tuple[Any, torch.Tensor]:
    """An agent and the memory that it has registered."""
    api: Any = importlib.import_module(f"{PACKAGE}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    agent.register_memory([(memory.data_ptr(), num_bytes, 0, "")], "DRAM")
    return agent, memory


def _places(address: int, num_blocks: int, block_bytes: int, *, seed: int) -> list[tuple[int, int, int]]:
    order = list(range(num_blocks))
    random.Random(seed).shuffle(order)
    return [(address + index * block_bytes, block_bytes, 0) for index in order]
