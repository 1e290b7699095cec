"""The parts that model families share. Parameters are left as allocated: the loader fills every one.

Knows no family and no configuration: sizes come as arguments. Shapes: T token, D hidden channel.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, layer_norm, rms_norm, silu


class Linear(nn.Linear):
    """A linear layer that draws no initial weights."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)

    def reset_parameters(self) -> None:
        """Drawing billions of numbers that loading overwrites takes minutes."""


class FusedLinear(Linear):
    """Several of a checkpoint's linear layers that read the same input, computed as one.

    Args:
        parts: (name in the checkpoint, output features) of each, in the order of the output.
    """

    def __init__(
        self, in_features: int, parts: tuple[tuple[str, int], ...], *, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__(in_features, sum(rows for _, rows in parts), dtype=dtype, bias=bias)
        self.parts = parts

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """(tensor name in the checkpoint, relative to this layer's parent; the rows that it fills)."""
        sizes = [rows for _, rows in self.parts]
        for parameter_name, parameter in self.named_parameters():
            for (part, _), view in zip(self.parts, torch.split(parameter.data, sizes), strict=True):
                yield f"{part}.{parameter_name}", view


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

    def forward(self, ids_T: Tensor) -> Tensor:
        return embedding(ids_T, self.weight)


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
