"""Adapters of routed experts: computes the product of each (expert, adapter) pair for the tokens routed to it.

A layer has a slot for each pair; a slot's number is place * count + adapter, with the expert's place in this rank's
memory. The activation between an expert's two products needs the sum of the first product and its adapter. So the
products are separate launches, and a token's row is copied for each of its experts.

Legend: as in `baton.models.layers.moe.experts`; S assignment of a token to an expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.models.adapters.layer import AdaptedLayer
from baton.models.kernels.adapter_rows import AdapterRows, group_by_adapter
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import multiply_by_expert
from baton.models.layers.mlp import silu_and_multiply
from baton.models.layers.moe.experts import Experts


class AdaptedExperts:
    """A layer's experts, or one rank's share of them, with the matrices of `count` adapters.

    Args:
        rows: the adapters of the step's tokens; None: no token has one.
        batch_invariant: a token has the same bits in every step, also in one in which no token has an adapter.
    """

    def __init__(
        self,
        experts: Experts,
        rows: Callable[[], AdapterRows | None],
        *,
        count: int,
        rank: int,
        batch_invariant: bool,
    ) -> None:
        held, size, inner = experts.down_proj.shape
        dtype, device = experts.down_proj.dtype, experts.down_proj.device
        self._experts, self._rows = experts, rows
        self._count, self._slots = count, held * count
        self._batch_invariant = batch_invariant
        self.gate_up = AdaptedLayer(size, (inner, inner), slots=self._slots, rank=rank, dtype=dtype, device=device)
        self.down = AdaptedLayer(inner, (size,), slots=self._slots, rank=rank, dtype=dtype, device=device)

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor | None:
        """Returns the weighted sum of each token's experts. Returns None in a step in which no token has an adapter,
        whose experts other kernels compute faster and with other bits; in batch-invariant mode it computes them too."""
        rows = self._rows()
        if not len(x_TD) or (rows is None and not self._batch_invariant):
            return None
        choices, places_TK = experts_TK.shape[1], self._experts.places(experts_TK)
        tokens_S = torch.arange(experts_TK.numel(), device=x_TD.device) // choices
        pairs_S = None if rows is None else self._pairs(places_TK, rows.slots_T)
        # NOTE: this torch kernel must run between the sorting and the products (see `group_by_adapter`).
        x_SD = x_TD.index_select(0, tokens_S)
        gate_up_SI = self._multiply(x_SD, self._experts.gate_up_proj, places_TK)
        if pairs_S is not None:
            self.gate_up.add(x_SD, gate_up_SI, pairs_S, batch_invariant=self._batch_invariant)
        gated_SI = silu_and_multiply(gate_up_SI)
        out_SD = self._multiply(gated_SI, self._experts.down_proj, places_TK)
        if pairs_S is not None:
            self.down.add(gated_SI, out_SD, pairs_S, batch_invariant=self._batch_invariant)
        out_TKD = out_SD.unflatten(0, experts_TK.shape).float()
        if self._experts.of is not None:
            out_TKD = torch.where((places_TK >= 0).unsqueeze(2), out_TKD, 0)
        out_TD: Tensor = (out_TKD * weights_TK.unsqueeze(2)).sum(1).to(x_TD.dtype)
        return out_TD

    def _pairs(self, places_TK: Tensor, slots_T: Tensor) -> AdapterRows:
        slots_T1 = slots_T.unsqueeze(1)
        pairs_TK = torch.where((places_TK >= 0) & (slots_T1 >= 0), places_TK * self._count + slots_T1, -1)
        pairs_S = pairs_TK.flatten().to(torch.int32)
        if not pairs_S.is_cuda:
            return AdapterRows(pairs_S, None, None, 0)
        return group_by_adapter(pairs_S, num_slots=self._slots, batch_invariant=self._batch_invariant)

    def _multiply(self, x_SC: Tensor, weights_ENC: Tensor, places_TK: Tensor) -> Tensor:
        """Returns each assignment's product; rows of other ranks' experts are undefined."""
        if x_SC.is_cuda:
            weights = ExpertWeights(weights_ENC)
            return multiply_by_expert(
                x_SC, places_TK, weights, batch_invariant=self._batch_invariant, of=self._experts.of
            )
        out_SN, places_S = x_SC.new_zeros(len(x_SC), weights_ENC.shape[1]), places_TK.flatten()
        for place in places_S[places_S >= 0].unique().tolist():
            own_S = places_S == place
            out_SN[own_S] = self._experts.multiply(x_SC[own_S], weights_ENC[place], None)
        return out_SN
