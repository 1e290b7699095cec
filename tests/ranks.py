"""The same work in several processes at once, each of them a rank: on the CPU, connected by gloo, or on a GPU of its
own, connected by NCCL."""

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

from baton.models.layers.parallel import TensorParallel
from tests.warm import fork_server


def run_ranks(work: Callable[..., Any], size: int, directory: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` gives in each process, in their order.

    Args:
        work: a module's function.
        directory: empty.
    """
    fork_server()
    start_processes(_fork_ranks, (size, work, directory, arguments), nprocs=1, start_method="forkserver")
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _fork_ranks(_: int, size: int, work: Callable[..., Any], directory: Path, arguments: tuple[Any, ...]) -> None:
    """In a process without threads that has imported the module of `work`, which with PEFT takes 3 s: the ranks are its
    copies, so that none of them imports it again."""
    gc.freeze()  # collections of the ranks need not look at what was imported, and so do not copy its memory
    start_processes(_run_rank, (size, work, directory, arguments), nprocs=size, start_method="fork")


def _run_rank(rank: int, size: int, work: Callable[..., Any], directory: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    try:
        torch.save(work(TensorParallel(rank, size), *arguments), directory / f"{rank}.pt")
        dist.barrier()  # a rank that leaves earlier breaks connections that others are still making
    finally:
        dist.destroy_process_group()


def run_gpu_ranks(work: Callable[..., Any], size: int, directory: Path, *arguments: Any) -> list[Any]:
    """Does what `run_ranks` does, with a GPU for each rank."""
    start_processes(_run_gpu_rank, (size, work, directory, arguments), nprocs=size, start_method="spawn")
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(size)]


def run_ranks_on_one_gpu(work: Callable[..., Any], size: int, directory: Path, *arguments: Any) -> list[Any]:
    """Does what `run_ranks` does, with processes that share the first GPU. They are connected by gloo, and can map
    each other's memory."""
    start_processes(_share_gpu, (size, work, directory, arguments), nprocs=size, start_method="spawn")
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _share_gpu(rank: int, size: int, work: Callable[..., Any], directory: Path, arguments: tuple[Any, ...]) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    _run_rank(rank, size, work, directory, arguments)


def _run_gpu_rank(rank: int, size: int, work: Callable[..., Any], directory: Path, arguments: tuple[Any, ...]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{directory}/store", rank=rank, world_size=size, device_id=device
    )
    try:
        torch.save(work(TensorParallel(rank, size), *arguments), directory / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
