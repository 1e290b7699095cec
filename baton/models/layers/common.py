"""Norms, embedding and gated MLP, which model families share. Parameters are allocated and not initialized: the loader
fills every one.

On a GPU one kernel does what several calls of torch do on a CPU, with the same roundings. Shapes: T token, D hidden
channel, I channel of an MLP, H head, C head channel.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm, linear, rms_norm

from baton.models.kernels import activation, norms
from baton.models.layers.elementwise import gelu, silu
from baton.models.layers.linear import FusedLinear, Linear, Multiply
from baton.models.layers.parallel import ParallelModule, TensorParallel
from baton.models.layers.token_exchange import ExchangingModule


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * (weight_offset + weight), in float32, rounded once."""

    weight_offset: ClassVar[int] = 0

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return norms.rms_norm(x_TD, self) if x_TD.is_cuda else self._in_torch(x_TD)

    def add_and_norm(
        self, stream_TD: Tensor, update_TD: Tensor | None, *, update_norm: "RMSNorm | None" = None
    ) -> Tensor:
        """Adds the update to the residual stream in place and returns the normalized sum.

        Args:
            update_TD: None before the first layer, where there is nothing to add yet.
            update_norm: applied to the update before it is added.
        """
        if update_TD is None:
            return self.forward(stream_TD)
        if stream_TD.is_cuda:
            return norms.add_rms_norm(stream_TD, update_TD, self, update_norm=update_norm)
        return self._in_torch(stream_TD.add_(update_TD if update_norm is None else update_norm(update_TD)))

    def _in_torch(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * (weight_offset + weight) + bias."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, bias: bool = True, weight_offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype)) if bias else None
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_D = self.weight + self.weight_offset if self.weight_offset else self.weight
        return layer_norm(x_TD, weight_D.shape, weight_D, self.bias, self.eps)


class NormOfEachHead(ParallelModule):
    """Layer norms without biases, one for each head. Every rank has all their weights, of which it uses those of its
    heads.

    Args:
        num_heads: of the whole model.
        held: a rank's heads among that many.
    """

    def __init__(
        self,
        num_heads: int,
        size: int,
        *,
        held: Callable[[int, TensorParallel], range],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, size, dtype=dtype))
        self.held, self.eps = held, eps

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """(Tensor name in the checkpoint, relative to this layer; the row that it fills.)"""
        for head, row in enumerate(self.weight.data):
            yield f"norms.{head}.weight", row

    def forward(self, x_THC: Tensor) -> Tensor:
        heads = self.held(len(self.weight), self.parallel)
        normed_THC = layer_norm(x_THC.float(), x_THC.shape[-1:], eps=self.eps)
        return (normed_THC * self.weight[heads.start : heads.stop].float()).to(x_THC.dtype)


class Embedding(ExchangingModule):
    """Token embedding. Every rank has the same number of rows, of consecutive ids."""

    def __init__(self, num_embeddings: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size, dtype=dtype))
        self.multiply: Multiply = linear

    def forward(self, ids_T: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return embedding(ids_T, self.weight)
        rows_T = ids_T - self.parallel.rank * len(self.weight)
        elsewhere_T = (rows_T < 0) | (rows_T >= len(self.weight))
        rows_TD = embedding(rows_T.masked_fill_(elsewhere_T, 0), self.weight)
        return self.sum_of_ranks(rows_TD.masked_fill_(elsewhere_T.unsqueeze(-1), 0))

    def as_head(self, x_TD: Tensor) -> Tensor:
        """Logits of this rank's ids, for a model whose head is tied to its embedding."""
        return self.multiply(x_TD, self.weight, None)


def silu_and_multiply(gate_up_TI: Tensor) -> Tensor:
    """silu of the first half of the channels, times the second half."""
    if gate_up_TI.is_cuda:
        return activation.silu_and_multiply(gate_up_TI)
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return silu(gate_TI) * up_TI


def gelu_tanh_and_multiply(gate_up_TI: Tensor) -> Tensor:
    """gelu, approximated by tanh, of the first half of the channels, times the second half."""
    if gate_up_TI.is_cuda:
        return activation.gelu_tanh_and_multiply(gate_up_TI)
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return gelu(gate_TI, approximate="tanh") * up_TI


class GatedMLP(nn.Module):
    """An MLP whose first product gives gate and up.

    Args:
        activate: takes both in one tensor, the gate's channels first.
    """

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
