"""The mean of the squares of each row, in an order that does not depend on the number of rows.

torch's own mean on a GPU gives few rows more threads each, which add in another order. Legend: T token, X channel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS_PER_WARP = 512
_MOST_WARPS = 16


def mean_squares(x_TX: Tensor) -> Tensor:
    """Returns the mean of each row's squares [T], in float32.

    Args:
        x_TX: any stride over tokens, channels side by side.
    """
    return mean_squares_by_kernel(x_TX) if x_TX.is_cuda else x_TX.float().square().mean(-1)


def mean_squares_by_kernel(x_TX: Tensor) -> Tensor:
    """Does what `mean_squares` does, in one launch."""
    num_tokens, size = x_TX.shape
    means_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TX.device)
    block = triton.next_power_of_2(size)
    if num_tokens:
        _mean_squares[(num_tokens,)](
            x_TX,
            means_T,
            x_TX.stride(0),
            CHANNELS=size,
            BLOCK=block,
            num_warps=min(_MOST_WARPS, max(1, block // _CHANNELS_PER_WARP)),
        )
    return means_T


@triton.jit
def _mean_squares(x_ptr, means_ptr, x_stride, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    token = tl.program_id(0).to(tl.int64)
    channels_X = tl.arange(0, BLOCK)
    x_X = tl.load(x_ptr + token * x_stride + channels_X, mask=channels_X < CHANNELS, other=0.0).to(tl.float32)
    tl.store(means_ptr + token, tl.sum(x_X * x_X, axis=0) / CHANNELS)
