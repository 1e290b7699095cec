"""Elementwise functions in plain torch whose bits do not depend on a number's place in the tensor.

torch's own functions round differently where they compute numbers one by one, as at the end of a tensor, so a token's
result would depend on the number of tokens (on a CPU with AVX-512, 4 to 20 % of random numbers differ). exp, log1p,
tanh and erf do not. The functions here compute in float32 and round once. On a GPU, which computes each number alike,
they are torch's.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

_TANH_CUBE = 0.044715  # of gelu's approximation


def widened(x: Tensor) -> Tensor:
    """Converts to float32 unless the dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sigmoid(x: Tensor) -> Tensor:
    if x.is_cuda:
        return torch.sigmoid(x)
    return torch.exp(-widened(x)).add_(1).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    if x.is_cuda:
        return functional.silu(x)
    wide = widened(x)
    return sigmoid(wide).mul_(wide).to(x.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Computes Gaussian error linear units, in float32 on a CPU.

    Args:
        approximate: "none", or "tanh".
    """
    if x.is_cuda:
        return functional.gelu(x, approximate=approximate)
    wide = widened(x)
    if approximate == "tanh":
        inner = wide * wide * wide * _TANH_CUBE
        inner.add_(wide).mul_(math.sqrt(2 / math.pi)).tanh_()
    else:
        inner = (wide * math.sqrt(0.5)).erf_()
    return inner.add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)) without overflow."""
    return torch.exp(-x.abs()).log1p_().add_(x.clamp(min=0))
