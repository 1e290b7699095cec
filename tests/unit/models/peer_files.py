"""Memory of ranks that are processes of one host without GPUs: a file for each rank, which all of them map."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from baton.models.kernels.moe import expert_dispatch
from baton.models.kernels.moe.expert_dispatch import DispatchMemory
from baton.models.kernels.peer_sums import EMPTY, PeerMemory, num_places
from baton.models.layers.parallel import TensorParallel


def with_peer_files(
    parallel: TensorParallel, directory: Path, *, rows: int, width: int, dtype: torch.dtype
) -> TensorParallel:
    """Does what `with_peer_memory` does. The directory is the same on all ranks, and empty at first."""
    mapped = _map(parallel, directory, num_places(parallel.size, rows, width) * dtype.itemsize)
    memory = PeerMemory(
        parallel.rank,
        parallel.size,
        torch.tensor([each.data_ptr() for each in mapped]),
        torch.zeros(rows, dtype=torch.int32),
        dtype,
        width,
        num_programs=2,
        owner=mapped,
    )
    return replace(parallel, peers=memory)


def with_dispatch_files(
    parallel: TensorParallel, directory: Path, *, rows: int, width: int, choices: int, dtype: torch.dtype
) -> TensorParallel:
    """Does what `with_dispatch_memory` does. The directory is the same on all ranks, and empty at first."""
    count = expert_dispatch.num_bytes(parallel.size, rows, width=width, choices=choices, dtype=dtype)
    mapped = _map(parallel, directory, count)
    memory = DispatchMemory(
        parallel.rank,
        parallel.size,
        torch.tensor([each.data_ptr() for each in mapped]),
        torch.zeros(rows, dtype=torch.int32),
        dtype,
        width,
        choices,
        owner=mapped,
    )
    return replace(parallel, dispatch=memory)


def _map(parallel: TensorParallel, directory: Path, count: int) -> list[Tensor]:
    """Bytes of each rank, all of which are `EMPTY`."""

    def memory(rank: int) -> Tensor:
        return torch.from_file(str(directory / f"places{rank}"), shared=True, size=count, dtype=torch.uint8)

    memory(parallel.rank).fill_(EMPTY & 0xFF)
    dist.barrier(parallel.group)
    return [memory(rank) for rank in range(parallel.size)]
