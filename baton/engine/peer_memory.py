"""Maps memory of all ranks of one host into each of them, for `baton.models.kernels.peer_sums` and
`baton.models.kernels.moe.expert_dispatch`.

It uses torch's symmetric memory for nothing but that: our kernels read and write it, without NVLink multicast.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from baton.models.kernels.moe import expert_dispatch
from baton.models.kernels.moe.expert_dispatch import DispatchMemory
from baton.models.kernels.peer_sums import EMPTY, PeerMemory, num_places
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import TensorParallel
from baton.settings.environment import disable_nvlink_multicast

# Rows of the largest sum, and of a rank's largest dispatch. A sum's places take 32 MiB on each of two ranks at 8,192
# channels in bf16, 128 MiB on each of 8; those of a dispatch at 7,168 channels take 42 and 168 MiB.
ROWS = 512
_log = logging.getLogger(__name__)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def share_memory(model: CausalLM, *, dtype: torch.dtype, device: torch.device) -> None:
    """Lets the ranks of a loaded model add up small tensors through each other's memory, or send tokens to their
    experts if ranks have tokens of their own, if they can. All ranks call this at the same time."""
    parallel, config = model.parallel, model.config
    if parallel.size == 1:
        return
    if parallel.sends_to_experts:
        assert config.moe is not None, "there is no attention data parallelism without experts"
        choices = config.moe.experts_per_token
        joined = with_dispatch_memory(parallel, width=config.hidden_size, choices=choices, dtype=dtype, device=device)
    else:
        joined = with_peer_memory(parallel, width=config.hidden_size, dtype=dtype, device=device)
    model.join(joined, vocab_size=model.vocab_size)


def with_peer_memory(
    parallel: TensorParallel, *, width: int, dtype: torch.dtype, device: torch.device
) -> TensorParallel:
    """Returns the rank with memory of its peers, for sums of rows of this width. If a rank cannot map it, all ranks
    keep to NCCL, and rank 0 logs why. All ranks call this at the same time.

    Args:
        device: this rank's GPU.
    """
    num_bytes = num_places(parallel.size, ROWS, width) * dtype.itemsize
    shared = _share(parallel, num_bytes, device, otherwise="ranks add up small tensors over NCCL")
    if shared is None:
        return parallel
    memory = PeerMemory(
        rank=parallel.rank,
        size=parallel.size,
        addresses_R=shared.addresses_R,
        turns_T=torch.zeros(ROWS, dtype=torch.int32, device=device),
        dtype=dtype,
        width=width,
        num_programs=torch.cuda.get_device_properties(device).multi_processor_count,
        owner=shared,
    )
    return replace(parallel, peers=memory)


def with_dispatch_memory(
    parallel: TensorParallel, *, width: int, choices: int, dtype: torch.dtype, device: torch.device
) -> TensorParallel:
    """Does what `with_peer_memory` does, for tokens on their way to `choices` experts each."""
    num_bytes = expert_dispatch.num_bytes(parallel.size, ROWS, width=width, choices=choices, dtype=dtype)
    shared = _share(parallel, num_bytes, device, otherwise="ranks gather their tokens for experts over NCCL")
    if shared is None:
        return parallel
    memory = DispatchMemory(
        rank=parallel.rank,
        size=parallel.size,
        addresses_R=shared.addresses_R,
        turns_T=torch.zeros(ROWS, dtype=torch.int32, device=device),
        dtype=dtype,
        width=width,
        choices=choices,
        owner=shared,
    )
    return replace(parallel, dispatch=memory)


@dataclass(frozen=True, eq=False)
class _Shared:
    """Memory of all ranks, mapped into this one as long as the object lives.

    Attributes:
        addresses_R: int64, where each rank's memory begins, as this rank addresses it.
        owner: what keeps it mapped.
    """

    addresses_R: Tensor
    owner: object


def _share(parallel: TensorParallel, num_bytes: int, device: torch.device, *, otherwise: str) -> _Shared | None:
    """Allocates this rank's memory, all of it `EMPTY`, and maps all ranks'. None: a rank cannot, and rank 0 logs why.

    Args:
        otherwise: what the ranks then do, for the log.
    """
    memory, shared = None, None
    obstacle = _first(parallel, _obstacle(parallel, device))
    if obstacle is None:
        try:
            memory = _allocate(num_bytes, device)
        except RuntimeError as error:
            obstacle = str(error).partition("\n")[0]
        obstacle = _first(parallel, obstacle)  # before ranks wait for each other's memory
    if obstacle is None:
        assert memory is not None, "no rank has an obstacle"
        try:
            shared = _map(parallel, memory)
        except RuntimeError as error:
            obstacle = str(error).partition("\n")[0]
        obstacle = _first(parallel, obstacle)
    if obstacle is None:
        return shared
    if parallel.rank == 0:
        _log.warning("%s, because they cannot map each other's memory: %s", otherwise, obstacle)
    return None


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


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    disable_nvlink_multicast()
    memory: Tensor = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    return memory.fill_(EMPTY & 0xFF)  # which is `EMPTY` in numbers of any size


def _map(parallel: TensorParallel, memory: Tensor) -> _Shared:
    """The caller waits for the other ranks afterwards: they may write as soon as all memory is empty."""
    group = parallel.group or dist.group.WORLD
    assert group is not None, "there are several ranks"
    mapped: Any = symmetric_memory.rendezvous(memory, group)  # torch's types lack `offset`
    torch.cuda.synchronize(memory.device)
    addresses = [address + mapped.offset for address in mapped.buffer_ptrs]
    return _Shared(torch.tensor(addresses, device=memory.device), (memory, mapped))
