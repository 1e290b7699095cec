"""Finds the device that a node's setting names."""

import torch

from baton.core.errors import ConfigError

_DEVICES = ("auto", "cpu", "cuda", "cuda:<index>")


def resolve_device(device: str) -> torch.device:
    """The device of that name; for a GPU with its index, so that it is the same GPU in every thread.

    Raises:
        ConfigError: there is no such device here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device is {device!r}", field="device", value=device, allowed=_DEVICES) from None
    if resolved.type != "cuda":
        return resolved
    count = torch.cuda.device_count()
    index = resolved.index or 0
    if index >= count:
        raise ConfigError(
            f"device is {device}, and this machine has {count} GPU(s)",
            field="device",
            value=device,
            allowed=("auto", "cpu", *(f"cuda:{index}" for index in range(count))),
            cure="install a torch with CUDA, give the container a GPU, or use --device cpu" if count == 0 else "",
        )
    return torch.device("cuda", index)
