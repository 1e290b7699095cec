"""How a process becomes a rank: its device, and the group of torch.distributed."""

import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from baton.environment import use_loopback_for_gloo
from baton.errors import ConfigError
from models.parallel import TensorParallel

# Ranks read a checkpoint at their own pace and wait this long for each other. The end of one ends the wait at once.
_TIMEOUT = timedelta(minutes=20)


def join(rank: int, size: int, *, store: Path, device: str) -> TensorParallel:
    """Joins the other ranks: over NCCL where they have GPUs, else over gloo on this machine's loopback device.

    Args:
        store: a file that all ranks see and that no other group has used.
        device: the node's setting; each rank takes a GPU of its own.
    """
    place = torch.device(rank_device(device, rank))
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place)
    else:
        use_loopback_for_gloo()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=place if on_gpu else None,
    )
    return TensorParallel(rank, size)


def leave() -> None:
    """Leaves the group, if there is one. A rank calls this last."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        dist.destroy_process_group()
        return
    # NOTE: NCCL would wait for the graphs that it is part of, and for ranks that are gone.
    logging.shutdown()
    os._exit(0)


def rank_device(device: str, rank: int) -> str:
    """The device of one rank: the node's own for rank 0, the following GPUs for the others.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name, _, first = device.partition(":")
    if name != "cuda" or not (first or "0").isdigit():
        return device
    index, count = int(first or 0) + rank, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"rank {rank} would need cuda:{index}, and this machine has {count} GPU(s)",
            field="tensor_parallel_size",
            value=rank + 1,
            allowed=(f"up to {count}",),
            cure="lower --tensor-parallel-size, or take another --device",
        )
    return f"cuda:{index}"
