"""Checks whether torch can use the visible GPUs, whether they reach each other, and how much memory is free."""

import itertools
from collections.abc import Iterator

import torch

from baton.node.doctor.verdict import Verdict, fail, ok, warn
from baton.settings.environment import visible_gpus

_LEAST_CAPABILITY = (8, 0)


def check_gpus() -> Iterator[Verdict]:
    shown = visible_gpus()
    if not torch.cuda.is_available():
        if shown:
            cure = "install a torch whose CUDA fits the driver; nvidia-smi shows the driver's CUDA version"
            yield fail("GPUs", f"{shown} visible, and torch {torch.__version__} cannot use them", cure)
        else:
            yield ok("GPUs", "none: nodes run on the CPU")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        yield _gpu(index)
    for one, other in itertools.combinations(range(count), 2):
        yield _peers(one, other)


def _gpu(index: int) -> Verdict:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    check = f"GPU {index}"
    found = f"{properties.name}, {free >> 30} of {total >> 30} GiB free, compute capability "
    found += f"{properties.major}.{properties.minor}"
    if (properties.major, properties.minor) < _LEAST_CAPABILITY:
        least = ".".join(map(str, _LEAST_CAPABILITY))
        return fail(check, found, f"use a GPU of compute capability {least} or later")
    if free < total // 2:
        return warn(check, found, "end other programs on this GPU, or lower --gpu-memory-fraction")
    return ok(check, found)


def _peers(one: int, other: int) -> Verdict:
    check = f"GPU {one} and GPU {other}"
    if torch.cuda.can_device_access_peer(one, other):
        return ok(check, "reach each other's memory")
    return warn(
        check,
        "do not reach each other's memory",
        "KV goes through the host; nvidia-smi topo -m shows how they are linked",
    )
