"""Makes a process a rank: chooses its device, and joins the group of torch.distributed."""

import socket
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import distributed as dist

from baton.core.errors import ConfigError
from baton.models.layers.parallel import TensorParallel
from baton.node.ranks.messages import Meeting
from baton.settings.environment import use_device_for_gloo
from baton.settings.node_config import NodeSettings

# Ranks read a checkpoint at their own pace and wait this long for each other. If one ends, the wait ends at once.
_TIMEOUT = timedelta(minutes=20)
_LOOPBACK = "127.0.0.1"  # host 0 reaches its own store here
_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch has no types for it


def join(rank: int, settings: NodeSettings, *, meeting: Meeting) -> TensorParallel:
    """Joins the other ranks, over NCCL if they have GPUs, else over gloo. Each rank takes its own GPU.

    Gloo uses the network device that leads to host 0 or, on one host, the loopback device.
    """
    size, place = settings.tensor_parallel_size, torch.device(rank_device(settings, rank))
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place)
    else:
        use_device_for_gloo("lo" if meeting.file is not None else _device_to(meeting.host, meeting.port))
    how: dict[str, Any] = {"init_method": f"file://{meeting.file}"}
    if meeting.file is None:
        host = _LOOPBACK if rank < settings.ranks_per_host else meeting.host
        how = {"store": _TCP_STORE(host, meeting.port, is_master=False, timeout=_TIMEOUT)}
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=place if on_gpu else None,
        **how,
    )
    # With attention data parallelism ranks add up no rows of the whole model.
    return replace(as_rank(rank, settings), share_memory=on_gpu and not settings.attention_data_parallel)


def as_rank(rank: int, settings: NodeSettings) -> TensorParallel:
    """A rank's part of a model that is split as in the settings."""
    return TensorParallel(
        rank,
        settings.tensor_parallel_size,
        whole_experts=settings.expert_parallel,
        own_attention=settings.attention_data_parallel,
    )


def serve_store(host: str) -> tuple[object, Meeting]:
    """Opens a store on a free port of this host, at which ranks of several hosts meet. It lasts as long as the object.

    NOTE: like NCCL and gloo it authenticates nobody: a separate network, or a network policy, must keep others away.

    Args:
        host: name or address by which other hosts reach this one. It may not resolve yet, or not on this host.
    """
    # The store listens on all addresses. With `host`, torch would try for 20 minutes to reach itself there.
    store = _TCP_STORE(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    return store, Meeting(None, host, store.port)


def _device_to(host: str, port: int) -> str:
    """Name of the network device over which this host sends to that one; the loopback device if it is not found."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(f"host 0's name {host!r} has no address here: {error}", field="leader_address") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    return "lo"


def rank_device(settings: NodeSettings, rank: int) -> str:
    """The device of one rank: the node's own for the first rank of each host, the following GPUs for the others.

    Raises:
        ConfigError: there are too few GPUs.
    """
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name, _, first = device.partition(":")
    if name != "cuda" or not (first or "0").isdigit():
        return device
    nth = rank % settings.ranks_per_host
    index, count = int(first or 0) + nth, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"rank {rank} needs cuda:{index}, and this machine has {count} GPU(s)",
            field="tensor_parallel_size",
            value=nth + 1,
            allowed=(f"up to {count}",),
            cure="lower --tensor-parallel-size, or take another --device",
        )
    return f"cuda:{index}"
