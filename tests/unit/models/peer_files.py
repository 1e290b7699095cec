"""Memory of ranks that are processes of one host without GPUs: a file for each rank, which all of them map."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from baton.models.kernels.peer_sums import EMPTY, PeerMemory, num_places
from baton.models.layers.parallel import TensorParallel


def with_peer_files(
    parallel: TensorParallel, directory: Path, *, rows: int, width: int, dtype: torch.dtype
) -> TensorParallel:
    """Does what `with_peer_memory` does. The directory is the same on all ranks, and empty at first."""
    bits, count = (torch.int32 if dtype.itemsize == 4 else torch.int16), num_places(parallel.size, rows, width)

    def places(rank: int) -> Tensor:
        return torch.from_file(str(directory / f"places{rank}"), shared=True, size=count, dtype=bits)

    places(parallel.rank).fill_(EMPTY)
    dist.barrier(parallel.group)
    mapped = [places(rank) for rank in range(parallel.size)]
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
