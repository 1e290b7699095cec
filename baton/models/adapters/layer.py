"""One layer's part of every adapter slot, and the product that is added to the layer's result.

Legend: as in `baton.models.kernels.adapter_products`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.models.kernels.adapter_products import AdapterRows, SlotWeights, expand, shrink
from baton.models.kernels.matmul.matmul import multiply_invariant
from baton.models.layers.linear import Multiply
from baton.tritonlib.launch import MOST_OVERLAPPING_ROWS

# Up to this many tokens, shrink runs before the layer's own product, so that the two overlap.
MOST_SHRUNK_BEFORE = MOST_OVERLAPPING_ROWS


class AdaptedLayer:
    """One layer's part of every adapter slot.

    Args:
        sizes: outputs of each part of a fused layer.
        slots: number of the layer's slots. An adapter owns its own slot and every `stride`-th slot after it.
    """

    def __init__(
        self, inputs: int, sizes: Sequence[int], *, slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sizes, self.rank = tuple(sizes), rank
        self.weights = SlotWeights(
            torch.zeros(slots, len(sizes) * rank, inputs, dtype=dtype, device=device),
            torch.zeros(slots, sum(sizes), rank, dtype=dtype, device=device),
            torch.zeros(slots, len(sizes), dtype=torch.float32, device=device),
            self.sizes,
        )
        self._sums_TQC: Tensor | None = None

    def begin(self, x_TK: Tensor, rows: AdapterRows) -> None:
        """Launches shrink, for few tokens, before the layer's own kernel, which loads its weights meanwhile."""
        early = x_TK.is_cuda and len(x_TK) <= MOST_SHRUNK_BEFORE
        self._sums_TQC = self._shrink(x_TK, rows) if early else None

    def add(self, x_TK: Tensor, out_TN: Tensor, rows: AdapterRows, *, batch_invariant: bool) -> None:
        """Adds each token's product to the layer's result, in place."""
        if x_TK.is_cuda:
            sums_TQC, self._sums_TQC = self._sums_TQC, None
            expand(self._shrink(x_TK, rows) if sums_TQC is None else sums_TQC, out_TN, rows, self.weights)
        else:
            multiply: Multiply = multiply_invariant if batch_invariant else linear
            add_in_torch(x_TK, out_TN, rows.slots_T, self.weights, multiply)

    def _shrink(self, x_TK: Tensor, rows: AdapterRows) -> Tensor:
        return shrink(x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous(), rows, self.weights)

    def clear(self, slot: int, *, stride: int) -> None:
        """Empties an adapter's slots.

        Args:
            stride: number of adapters.
        """
        for each in (self.weights.a_SQK, self.weights.b_SNR, self.weights.scale_SP):
            each[slot::stride].zero_()


def add_in_torch(
    x_TK: Tensor, out_TN: Tensor, slots_T: Tensor, weights: SlotWeights, multiply: Multiply = linear
) -> None:
    """Computes the reference of `add_products`, one adapter after the other. The host waits for the slots."""
    for slot in slots_T.unique().tolist():
        if slot < 0:
            continue
        (tokens,) = torch.nonzero(slots_T == slot, as_tuple=True)
        shrunk = multiply(x_TK[tokens], weights.a_SQK[slot], None).split(weights.rank, dim=1)
        parts = zip(shrunk, weights.b_SNR[slot].split(weights.sizes), weights.scale_SP[slot], strict=True)
        sums = [multiply(h, b, None).float() * scale for h, b, scale in parts]
        out_TN[tokens] = (out_TN[tokens].float() + torch.cat(sums, dim=1)).to(out_TN.dtype)
