"""Copies several arrays from the host to the device in one asynchronous copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Triton compiles another kernel for a pointer that is not a multiple of 16, and wide loads need more.
_ALIGNMENT = 256


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device | str) -> list[Tensor]:
    """Returns the arrays as tensors: on a CPU in the same memory, on a GPU as views of one new allocation.

    The copy completes before the current stream's next work; the caller may change the arrays at once.
    """
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # torch keeps unreferenced pinned memory until the copy out of it is done.
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = staged.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _torch_dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
