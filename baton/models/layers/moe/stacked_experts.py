"""Experts in some checkpoints' layout: all of a layer in two tensors, inputs first, all gates before all ups.

Shapes: as in `baton.models.layers.moe.experts`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import SharedWeights, run_gated_experts
from baton.models.layers.mlp import silu_and_multiply
from baton.models.layers.moe.experts import Experts


class StackedExperts(Experts):
    """Experts in two tensors. Attributes are as in `baton.models.layers.moe.experts.Experts`, except for the order of
    axes."""

    def __init__(
        self,
        num_experts: int,
        size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        held: range | None = None,
    ) -> None:
        with torch.device("meta"):
            super().__init__(num_experts, size, intermediate_size, dtype=dtype, held=held)
        self.locate()
        num_experts = len(self.held)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, size, 2 * intermediate_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, size, dtype=dtype))

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "gate_up_proj", self.gate_up_proj.data
        yield "down_proj", self.down_proj.data

    def run_grouped(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        *,
        shared: SharedWeights | None = None,
        plus_TD: Tensor | None = None,
    ) -> Tensor:
        assert shared is None, "no family with such tensors has shared experts"
        return run_gated_experts(
            x_TD,
            weights_TK,
            self.places(experts_TK),
            ExpertWeights(self.gate_up_proj.transpose(1, 2)),
            ExpertWeights(self.down_proj.transpose(1, 2)),
            batch_invariant=self.batch_invariant,
            plus_TD=plus_TD,
            of=self.of,
        )

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        gate_up_RI = self.multiply(x_RD, self.gate_up_proj[expert].t(), None)
        return self.multiply(silu_and_multiply(gate_up_RI), self.down_proj[expert].t(), None)
