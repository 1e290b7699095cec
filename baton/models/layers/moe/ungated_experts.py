"""Experts without a gate: two products with the square of a ReLU in between.

Shapes: T token, C channel of inputs and outputs, E expert, K chosen expert of a token, I intermediate channel, R row of
some expert.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import GroupedActivation, run_gated_experts
from baton.models.layers.linear import Linear, Multiply
from baton.models.layers.moe.experts import RoutedExperts, run_experts, weighted_sum

_SQUARED_RELU = GroupedActivation(squared_relu=True)


class SquaredReluMLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int, *, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(size, intermediate_size, dtype=dtype, bias=bias)
        self.down_proj = Linear(intermediate_size, size, dtype=dtype, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(relu(self.up_proj(x_TD)).square())
        return out_TD


class SquaredReluExperts(RoutedExperts):
    """Experts without a gate. Attributes are as in `baton.models.layers.moe.experts.Experts`."""

    def __init__(
        self,
        num_experts: int,
        size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        held: range | None = None,
    ) -> None:
        held = range(num_experts) if held is None else held
        super().__init__(num_experts, held)
        num_experts = len(held)
        self.up_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, size, intermediate_size, dtype=dtype))
        self.multiply: Multiply = linear
        self.batch_invariant = False

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint's tensor name, relative to this module; the memory that it fills)."""
        for expert, up, down in zip(self.held, self.up_proj.data, self.down_proj.data, strict=True):
            yield f"{expert}.up_proj.weight", up
            yield f"{expert}.down_proj.weight", down

    def forward(self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if x_TC.is_cuda:
            return self.run_grouped(x_TC, weights_TK, experts_TK)
        places_TK = self.places(experts_TK)
        return weighted_sum(run_experts(x_TC, places_TK, len(self.up_proj), self._one), weights_TK)

    def run_grouped(self, x_TC: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Runs `forward` on a GPU without making the host wait."""
        return run_gated_experts(
            x_TC,
            weights_TK,
            self.places(experts_TK),
            ExpertWeights(self.up_proj),
            ExpertWeights(self.down_proj),
            activation=_SQUARED_RELU,
            batch_invariant=self.batch_invariant,
            of=self.of,
        )

    def _one(self, expert: int, x_RC: Tensor) -> Tensor:
        up_RI = self.multiply(x_RC, self.up_proj[expert], None)
        return self.multiply(relu(up_RI).square(), self.down_proj[expert], None)
