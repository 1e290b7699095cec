"""Maps memory of all ranks of one host into each of them, for `baton.models.kernels.peer_sums`.

It uses torch's symmetric memory for nothing but that: sums are computed by our kernel, without NVLink multicast.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from baton.models.kernels.peer_sums import EMPTY, PeerMemory, num_places
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import TensorParallel
from baton.settings.environment import disable_nvlink_multicast

# Rows of the largest sum. Its places take 32 MiB on each of two ranks at 8,192 channels in bf16, 128 MiB on each of 8.
ROWS = 512
_log = logging.getLogger(__name__)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def share_memory(model: CausalLM, *, dtype: torch.dtype, device: torch.device) -> None:
    """Lets the ranks of a loaded model add up small tensors through each other's memory, if they can. All ranks call
    this at the same time."""
    if model.parallel.size > 1:
        joined = with_peer_memory(model.parallel, width=model.config.hidden_size, dtype=dtype, device=device)
        model.join(joined, vocab_size=model.vocab_size)


def with_peer_memory(
    parallel: TensorParallel, *, width: int, dtype: torch.dtype, device: torch.device
) -> TensorParallel:
    """Returns the rank with memory of its peers, for sums of rows of this width. If a rank cannot map it, all ranks
    keep to NCCL, and rank 0 logs why. All ranks call this at the same time.

    Args:
        device: this rank's GPU.
    """
    places, memory = None, None
    obstacle = _first(parallel, _obstacle(parallel, device))
    if obstacle is None:
        try:
            places = _allocate(parallel, width, dtype, device)
        except RuntimeError as error:
            obstacle = str(error).partition("\n")[0]
        obstacle = _first(parallel, obstacle)  # before ranks wait for each other's memory
    if obstacle is None:
        assert places is not None, "no rank has an obstacle"
        try:
            memory = _map(parallel, places, width, dtype)
        except RuntimeError as error:
            obstacle = str(error).partition("\n")[0]
        obstacle = _first(parallel, obstacle)
    if obstacle is None:
        return replace(parallel, peers=memory)
    if parallel.rank == 0:
        _log.warning("ranks add up small tensors over NCCL, because they cannot map each other's memory: %s", obstacle)
    return parallel


def _obstacle(parallel: TensorParallel, device: torch.device) -> str | None:
    """Why this rank cannot reach the others' memory; None: it seems to be able to."""
    own = (_BOOT.read_text() if device.type == "cuda" else "", device.index)
    ranks: list[tuple[str, int]] = [own] * parallel.size
    dist.all_gather_object(ranks, own, group=parallel.group)
    if device.type != "cuda":
        return f"rank {parallel.rank} has no GPU"
    if any(host != own[0] for host, _ in ranks):
        return "they are on several hosts"
    for _, peer in ranks:
        if peer != device.index and not torch.cuda.can_device_access_peer(device, peer):
            return f"cuda:{device.index} has no access to cuda:{peer}"
    return None


def _first(parallel: TensorParallel, obstacle: str | None) -> str | None:
    """Returns the first rank's obstacle, on every rank."""
    obstacles = [obstacle] * parallel.size
    dist.all_gather_object(obstacles, obstacle, group=parallel.group)
    return next((each for each in obstacles if each is not None), None)


def _allocate(parallel: TensorParallel, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """This rank's places, all of them empty."""
    disable_nvlink_multicast()
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    places: Tensor = symmetric_memory.empty(num_places(parallel.size, ROWS, width), dtype=bits, device=device)
    return places.fill_(EMPTY)


def _map(parallel: TensorParallel, places: Tensor, width: int, dtype: torch.dtype) -> PeerMemory:
    """The caller waits for the other ranks afterwards: they may write as soon as all places are empty."""
    size, device = parallel.size, places.device
    group = parallel.group or dist.group.WORLD
    assert group is not None, "there are several ranks"
    mapped: Any = symmetric_memory.rendezvous(places, group)  # torch's types lack `offset`
    torch.cuda.synchronize(device)
    return PeerMemory(
        rank=parallel.rank,
        size=size,
        addresses_R=torch.tensor([address + mapped.offset for address in mapped.buffer_ptrs], device=device),
        turns_T=torch.zeros(ROWS, dtype=torch.int32, device=device),
        dtype=dtype,
        width=width,
        num_programs=torch.cuda.get_device_properties(device).multi_processor_count,
        owner=(places, mapped),
    )
