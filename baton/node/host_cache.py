"""The size of host memory for KV where the settings give none: a share of the machine's memory for each of its GPUs."""

from pathlib import Path

import torch

from baton.core.memory import available_bytes, memory_limit_bytes
from baton.settings.node_config import GIB, HOST_CACHE_FREE_SHARE, HOST_CACHE_GIB_MOST, HOST_CACHE_SHARE, NodeSettings

# The GPUs of the machine, also those that this process may not use. The driver makes it.
_GPUS = Path("/proc/driver/nvidia/gpus")
# Less is not worth the time to page-lock it.
_LEAST_GIB = 1.0


def with_host_cache(settings: NodeSettings) -> NodeSettings:
    """The settings with a size of host memory, before anything of the node takes memory. Nodes on CPUs get none."""
    if settings.host_cache_gib is not None:
        return settings
    gpus = _num_gpus(settings.device)
    size = host_cache_gib(
        memory_bytes=memory_limit_bytes(), free_bytes=available_bytes(), gpus=gpus, ranks=settings.ranks_per_host
    )
    return settings.model_copy(update={"host_cache_gib": size if gpus else 0.0})


def host_cache_gib(*, memory_bytes: int, free_bytes: int, gpus: int, ranks: int) -> float:
    """The host memory of each rank in GiB; 0: too little.

    Nodes of one machine that start together do not see each other's memory in what is free. So each GPU has a share of
    all memory, and what is free only lowers it.

    Args:
        memory_bytes: of the machine, or what the container may use.
        free_bytes: of the machine.
        gpus: of the machine.
        ranks: of the node on this machine.
    """
    share = memory_bytes * HOST_CACHE_SHARE / max(1, gpus)
    free = free_bytes * HOST_CACHE_FREE_SHARE / max(1, ranks)
    size = min(share / GIB, free / GIB, HOST_CACHE_GIB_MOST)
    return size if size >= _LEAST_GIB else 0.0


def _num_gpus(device: str) -> int:
    """GPUs of the machine, if the node uses one; else 0."""
    if device.partition(":")[0] not in ("auto", "cuda") or not torch.cuda.is_available():
        return 0
    listed = len(tuple(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    return max(listed, torch.cuda.device_count())
