"""The parts that model families share. Parameters are left as allocated: the loader fills every one.

Knows no family and no configuration: sizes come as arguments. Shapes: T token, D hidden channel.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, layer_norm, linear, rms_norm, silu

from models.linear import FusedLinear, Linear, Multiply


class RMSNorm(nn.Module):
    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self.weight.shape, self.weight, self.bias, self.eps)


class Embedding(nn.Module):
    def __init__(self, num_embeddings: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size, dtype=dtype))
        self.multiply: Multiply = linear

    def forward(self, ids_T: Tensor) -> Tensor:
        return embedding(ids_T, self.weight)

    def as_head(self, x_TD: Tensor) -> Tensor:
        """Logits, where a model ties its head to its embedding."""
        return self.multiply(x_TD, self.weight, None)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu of the first half of the last axis, times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_tanh_and_multiply(gate_up: Tensor) -> Tensor:
    """gelu, approximated by tanh, of the first half of the last axis, times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up


class GatedMLP(nn.Module):
    """`activate` takes gate and up side by side."""

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        bias: bool = False,
        activate: Callable[[Tensor], Tensor] = silu_and_multiply,
    ) -> None:
        super().__init__()
        self.activate = activate
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        self.gate_up_proj = FusedLinear(size, parts, dtype=dtype, bias=bias)
        self.down_proj = Linear(intermediate_size, size, dtype=dtype, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(self.activate(self.gate_up_proj(x_TD)))
        return out_TD
