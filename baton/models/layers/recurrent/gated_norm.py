"""The norm of a recurrent layer's outputs, head by head, times an activation of a gate.

Shapes: X any axes, V channel of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from baton.models.kernels.recurrent import gated_norm as kernels
from baton.models.layers.elementwise import sigmoid, silu


class GatedRMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight * f(gate), in float32, rounded once; f is silu, or a sigmoid."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, sigmoid: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps, self.sigmoid = eps, sigmoid

    def forward(self, x_XV: Tensor, gate_XV: Tensor) -> Tensor:
        """The normed and gated channels of each head.

        Args:
            x_XV: contiguous; the gate has one stride over tokens, and its heads and channels side by side.
        """
        if x_XV.is_cuda:
            return kernels.gated_norm(x_XV, gate_XV, self.weight, eps=self.eps, sigmoid=self.sigmoid)
        return self.in_torch(x_XV, gate_XV)

    def in_torch(self, x_XV: Tensor, gate_XV: Tensor) -> Tensor:
        normed_XV = rms_norm(x_XV.float(), self.weight.shape, self.weight.float(), self.eps)
        gate_XV = gate_XV.float()
        return (normed_XV * (sigmoid(gate_XV) if self.sigmoid else silu(gate_XV))).to(x_XV.dtype)
