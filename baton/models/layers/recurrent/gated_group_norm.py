"""The norm of a Mamba-2 layer's outputs, gated before it, by groups of channels.

Shapes: T token, X channel of all groups, G group, C channel of a group.
"""

import torch
from torch import Tensor, nn

from baton.models.kernels.recurrent.gated_group_norm import gated_group_norm
from baton.models.kernels.row_squares import mean_squares
from baton.models.layers.elementwise import silu
from baton.models.layers.parallel import ParallelModule


class GatedGroupNorm(ParallelModule):
    """v / sqrt(mean(v ** 2) + eps) * weight with v = x * silu(gate), in float32, rounded once, by groups.

    Args:
        size: of this rank.
        num_groups: number of groups with channels on this rank.
        ranks_per_group: number of ranks with equal parts of one group's channels; they sum up their squares.
    """

    def __init__(self, size: int, *, num_groups: int, ranks_per_group: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.num_groups, self.ranks_per_group, self.eps = num_groups, ranks_per_group, eps

    def forward(self, x_TX: Tensor, gate_TX: Tensor) -> Tensor:
        """The gated and normed channels of each token.

        Args:
            x_TX, gate_TX: any stride over tokens, channels side by side.
        """
        if x_TX.is_cuda and self.ranks_per_group == 1:
            return gated_group_norm(x_TX, gate_TX, self.weight, num_groups=self.num_groups, eps=self.eps)
        return self.in_torch(x_TX, gate_TX)

    def in_torch(self, x_TX: Tensor, gate_TX: Tensor) -> Tensor:
        gated_TX = x_TX.float() * silu(gate_TX.float())
        gated_TGC = gated_TX.unflatten(-1, (self.num_groups, -1))
        if self.ranks_per_group > 1:
            mean_TG1 = self._mean_of_ranks(mean_squares(gated_TX).view(-1, 1, 1))
        else:
            mean_TG1 = gated_TGC.square().mean(-1, keepdim=True)
        normed_TX: Tensor = (gated_TGC * torch.rsqrt(mean_TG1 + self.eps)).flatten(1)
        return (normed_TX * self.weight.float()).to(x_TX.dtype)

    def _mean_of_ranks(self, mean_T11: Tensor) -> Tensor:
        """Returns the mean over the whole group; this rank has a part of it. All ranks sum up one column per group."""
        parallel, ranks = self.parallel, self.ranks_per_group
        group = parallel.rank // ranks
        means_TG1 = mean_T11.new_zeros(len(mean_T11), parallel.size // ranks, 1)
        means_TG1[:, group] = mean_T11[:, 0] / ranks
        return parallel.all_reduce(means_TG1)[:, group : group + 1]
