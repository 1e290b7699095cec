"""One layer's part of every adapter slot, and the product that is added to the layer's result.

Legend: as in `baton.models.kernels.adapter_products`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.models.kernels.adapter_products import SlotWeights, add_products, add_rows, expand, new_sums, shrink
from baton.models.kernels.adapter_rows import MOST_SHARED_TOKENS, AdapterRows
from baton.models.kernels.matmul.matmul import multiply_invariant
from baton.models.layers.linear import Multiply
from baton.tritonlib.launch import MOST_OVERLAPPING_ROWS


class SideStream:
    """A stream on which kernels run next to those of the model's stream, in captured steps too."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """Lets the side stream's next kernels wait for all that is queued."""
        self._forked.record()
        self.stream.wait_event(self._forked)

    def join(self) -> None:
        """Lets the next kernels wait for the side stream's."""
        self._joined.record(self.stream)
        self._joined.wait()


class _Begun(NamedTuple):
    """What the side stream computes.

    Attributes:
        x_TK: the layer's input, held until the streams join.
        sums_TQC: the result of shrink.
        products_TN: the result of expand; None: expand is not launched yet.
    """

    x_TK: Tensor
    sums_TQC: Tensor
    products_TN: Tensor | None


class AdaptedLayer:
    """One layer's part of every adapter slot.

    Args:
        sizes: outputs of each part of a fused layer.
        slots: number of the layer's slots. An adapter owns its own slot and every `stride`-th slot after it.
        side: runs the products of few tokens next to the layer's own; None: all kernels run in order.
    """

    def __init__(
        self,
        inputs: int,
        sizes: Sequence[int],
        *,
        slots: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        side: SideStream | None = None,
    ) -> None:
        self.sizes, self.rank = tuple(sizes), rank
        self.weights = SlotWeights(
            torch.zeros(slots, len(sizes) * rank, inputs, dtype=dtype, device=device),
            torch.zeros(slots, sum(sizes), rank, dtype=dtype, device=device),
            torch.zeros(slots, len(sizes), dtype=torch.float32, device=device),
            self.sizes,
        )
        self._side = side
        self._begun: _Begun | None = None

    def begin(self, x_TK: Tensor, rows: AdapterRows) -> None:
        """Launches on the side stream what needs only the layer's input: shrink, and for more tokens expand as well.
        For few tokens expand follows later, and overlaps: it reads B before the layer's own product ends."""
        self._begun = None  # what a step that failed has left
        if self._side is None or len(x_TK) > MOST_SHARED_TOKENS:
            return
        # Allocated and freed on the model's stream: the streams have joined by then.
        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        sums_TQC, products_TN = new_sums(x_TK, rows, self.weights), None
        if rows.are_few and len(x_TK) > MOST_OVERLAPPING_ROWS:
            products_TN = x_TK.new_empty(len(x_TK), sum(self.sizes))
        self._side.fork()
        with torch.cuda.stream(self._side.stream):
            shrink(x_TK, rows, self.weights, sums_TQC, overlapping=products_TN is not None)
            if products_TN is not None:
                expand(sums_TQC, products_TN, rows, self.weights, adds=False)
        self._begun = _Begun(x_TK, sums_TQC, products_TN)

    def add(self, x_TK: Tensor, out_TN: Tensor, rows: AdapterRows, *, batch_invariant: bool) -> None:
        """Adds each token's product to the layer's result, in place."""
        begun, self._begun = self._begun, None
        if not x_TK.is_cuda:
            multiply: Multiply = multiply_invariant if batch_invariant else linear
            add_in_torch(x_TK, out_TN, rows.slots_T, self.weights, multiply)
        elif begun is None:
            add_products(x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous(), out_TN, rows, self.weights)
        else:
            assert self._side is not None
            self._side.join()
            if begun.products_TN is None:
                expand(begun.sums_TQC, out_TN, rows, self.weights)
            else:
                add_rows(begun.products_TN, out_TN, rows)

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
