"""The gated MLP and its activations. On a GPU one kernel applies the activation and multiplies, with torch's roundings,
and quantizes the result if the next layer can read it so.

Shapes: T token, D hidden channel, I channel of the MLP.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from baton.models.kernels import activation
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat
from baton.models.layers.elementwise import gelu, silu
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.row_reader import RowReader


def silu_and_multiply(gate_up_TI: Tensor) -> Tensor:
    """Returns silu of the first half of the channels, times the second half."""
    if gate_up_TI.is_cuda:
        return activation.silu_and_multiply(gate_up_TI)
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return silu(gate_TI) * up_TI


def gelu_tanh_and_multiply(gate_up_TI: Tensor) -> Tensor:
    """Returns gelu, approximated by tanh, of the first half of the channels, times the second half."""
    if gate_up_TI.is_cuda:
        return activation.gelu_tanh_and_multiply(gate_up_TI)
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return gelu(gate_TI, approximate="tanh") * up_TI


class GatedMLP(nn.Module, RowReader):
    """An MLP whose first product computes gate and up.

    Args:
        activate: takes gate and up in one tensor, the gate's channels first.
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
        out_TD: Tensor = self.down_proj(self._activated(self.gate_up_proj(x_TD)))
        return out_TD

    def row_format(self, num_tokens: int) -> RowFormat | None:
        return self.gate_up_proj.row_format(num_tokens)

    def _activated(self, gate_up_TI: Tensor) -> Tensor | QuantizedRows:
        row_format = self.down_proj.row_format(len(gate_up_TI))
        if row_format is not None and self.activate is silu_and_multiply:
            return activation.activate_and_quantize(gate_up_TI, row_format, tanh_gelu=False)
        if row_format is not None and self.activate is gelu_tanh_and_multiply:
            return activation.activate_and_quantize(gate_up_TI, row_format, tanh_gelu=True)
        return self.activate(gate_up_TI)
