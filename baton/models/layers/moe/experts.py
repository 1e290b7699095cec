"""The routed experts of a layer as batched tensors, and their computation on a CPU.

Shapes: T token, D hidden channel, E expert, K chosen expert of a token, S = T*K assignment, I intermediate channel,
R row of some expert, A row of the input.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from baton.models.config.expert_places import LayerPlaces
from baton.models.formats.fp8 import dequantize_blocks
from baton.models.kernels.moe.expert_dispatch import ExpertRanks
from baton.models.kernels.moe.expert_places import find_places
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import SharedWeights, run_gated_experts
from baton.models.layers.elementwise import widened
from baton.models.layers.expert_counts import LayerCounts
from baton.models.layers.linear import Multiply
from baton.models.layers.mlp import silu_and_multiply


class RoutedExperts(nn.Module):
    """A layer's experts, or one rank's share of them. A rank computes its experts for all tokens, and the sum over
    ranks is the result.

    Args:
        zero_experts: number of extra experts without weights, which are computed elsewhere.

    Attributes:
        held: numbers of the experts in memory, in order.
        of: the number of all experts; None: this rank holds all.
        own: the rank's places among those of all ranks (`baton.models.config.expert_places.LayerPlaces`).
        turns_EC: int32, the places of each expert's copies, which take tokens in turn; None if `of` is.
        copies_E: int32, number of copies of each expert.
        ranks_EC: int32, the ranks of those places; None without a plan.
        counts: counters for the tokens of each place of this layer; None: they are not counted.
        adapted: computes `forward` with adapters of experts, or returns None in a step without adapters
            (`baton.models.adapters.experts`); None: the experts have no slots for adapters.
    """

    def __init__(self, num_experts: int, held: Sequence[int], *, zero_experts: int = 0) -> None:
        super().__init__()
        self.held = held
        self._zero_experts = zero_experts
        self.of = None if len(held) == num_experts + zero_experts else num_experts + zero_experts
        self.own = range(held[0], held[0] + len(held))
        self.counts: LayerCounts | None = None
        self.adapted: Callable[[Tensor, Tensor, Tensor], Tensor | None] | None = None
        self.turns_EC: Tensor | None
        self.copies_E: Tensor | None
        self.ranks_EC: Tensor | None
        self.register_buffer("turns_EC", None, persistent=False)
        self.register_buffer("copies_E", None, persistent=False)
        self.register_buffer("ranks_EC", None, persistent=False)
        self.locate()

    def locate(self) -> None:
        """Makes the tables for consecutive experts without copies, on the current device."""
        if self.of is not None:
            self._set_turns([(expert,) for expert in range(self.of - self._zero_experts)])

    def place(self, places: LayerPlaces, rank: int) -> None:
        """Takes the rank's part of a plan, and makes its tables on the current device. Memory does not change: it
        already has one expert per place."""
        assert len(self.held) == len(places.ranks[rank])
        self.held, self.of = places.ranks[rank], len(places.turns) + self._zero_experts
        self.own = range(places.first(rank), places.first(rank) + len(self.held))
        self._set_turns(places.turns)
        assert self.turns_EC is not None
        ranks_P = [index for index, held in enumerate(places.ranks) for _ in held]
        self.ranks_EC = torch.tensor([*ranks_P, -1], dtype=torch.int32)[self.turns_EC]

    def take_places_of(self, other: "RoutedExperts") -> None:
        """Copies the places of the experts that this module replaces."""
        self.held, self.of, self.own, self._zero_experts = other.held, other.of, other.own, other._zero_experts
        self.turns_EC, self.copies_E, self.counts = other.turns_EC, other.copies_E, other.counts
        self.ranks_EC = other.ranks_EC

    def _set_turns(self, turns: Sequence[tuple[int, ...]]) -> None:
        turns = [*turns, *[(-1,)] * self._zero_experts]
        most = max(map(len, turns))
        self.turns_EC = torch.tensor([(*each, *each[:1] * (most - len(each))) for each in turns], dtype=torch.int32)
        self.copies_E = torch.tensor([len(each) for each in turns], dtype=torch.int32)

    @property
    def slots(self) -> Tensor | None:
        """The slots of all ranks' tokens in this step; None: nothing is counted."""
        return None if self.counts is None else self.counts.of_model.slots_T

    @property
    def expert_ranks(self) -> ExpertRanks:
        assert self.ranks_EC is not None, "ranks with whole experts have a plan"
        assert self.copies_E is not None
        return ExpertRanks(self.ranks_EC, self.copies_E)

    def places(self, experts_TK: Tensor) -> Tensor:
        """Returns the chosen experts' places in memory, -1 for another rank's and for padding, and counts the step's
        tokens."""
        if self.turns_EC is None or self.copies_E is None:
            return experts_TK
        slots_T = self.slots
        counts_P = None if self.counts is None or slots_T is None else self.counts.tokens_P
        assert slots_T is None or len(slots_T) == len(experts_TK), "the slots are those of the step's rows"
        if experts_TK.is_cuda:
            return find_places(
                experts_TK, self.turns_EC, self.copies_E, own=self.own, counts_P=counts_P, slots_T=slots_T
            )
        rows_T1 = torch.arange(len(experts_TK)).unsqueeze(1)
        places_TK = self.turns_EC[experts_TK, rows_T1 % self.copies_E[experts_TK]]
        if counts_P is not None and slots_T is not None:
            places_TK = places_TK.masked_fill(slots_T.unsqueeze(1) < 0, -1)
            counted_S = places_TK[places_TK >= 0]
            counts_P += counted_S.bincount(minlength=len(counts_P))
        is_own_TK = (places_TK >= self.own.start) & (places_TK < self.own.stop)
        return torch.where(is_own_TK, places_TK - self.own.start, -1)


class Experts(RoutedExperts):
    """All experts of a layer, or one rank's share of them, gated by silu.

    Attributes:
        gate_up_proj_scale_inv: scales of an fp8 `gate_up_proj`, float32 [E, rows, columns], one per block of 128x128
            numbers, the gate's rows before the up's; a weight is number * scale. `down_proj_scale_inv` is alike.
        power_of_two_inputs: on a GPU, inputs that are rounded to fp8 have powers of two as scales.
        multiply: on a CPU, as in `baton.models.layers.linear.Linear`.
        batch_invariant: on a GPU, a token's result has the same bits in every batch.
    """

    def __init__(
        self,
        num_experts: int,
        size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        held: range | None = None,
        zero_experts: int = 0,
    ) -> None:
        held = range(num_experts) if held is None else held
        super().__init__(num_experts, held, zero_experts=zero_experts)
        num_experts = len(held)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, size, intermediate_size, dtype=dtype))
        self.gate_up_proj_scale_inv: nn.Parameter | None
        self.down_proj_scale_inv: nn.Parameter | None
        self.register_parameter("gate_up_proj_scale_inv", None)
        self.register_parameter("down_proj_scale_inv", None)
        self.multiply: Multiply = linear
        self.power_of_two_inputs = False
        self.batch_invariant = False

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint's tensor name, relative to this module; the memory that it fills)."""
        for expert, gate_up, down in zip(self.held, self.gate_up_proj.data, self.down_proj.data, strict=True):
            gate, up = gate_up.chunk(2)
            yield f"{expert}.gate_proj.weight", gate
            yield f"{expert}.up_proj.weight", up
            yield f"{expert}.down_proj.weight", down

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, plus_TD: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of each token's experts.

        Args:
            plus_TD: added to the sum of a token's experts.
        """
        adapted_TD = None if self.adapted is None else self.adapted(x_TD, weights_TK, experts_TK)
        if adapted_TD is not None:
            return adapted_TD if plus_TD is None else adapted_TD + plus_TD
        if x_TD.is_cuda:
            return self.run_grouped(x_TD, weights_TK, experts_TK, plus_TD=plus_TD)
        places_TK = self.places(experts_TK)
        out_TD = weighted_sum(run_experts(x_TD, places_TK, len(self.gate_up_proj), self._one), weights_TK)
        return out_TD if plus_TD is None else out_TD + plus_TD

    def run_grouped(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        *,
        shared: SharedWeights | None = None,
        plus_TD: Tensor | None = None,
    ) -> Tensor:
        """Runs `forward` on a GPU, with the `shared` experts in the same launches, without making the host wait."""
        return run_gated_experts(
            x_TD,
            weights_TK,
            self.places(experts_TK),
            ExpertWeights(self.gate_up_proj, None, self.gate_up_proj_scale_inv, self.power_of_two_inputs),
            ExpertWeights(self.down_proj, None, self.down_proj_scale_inv, self.power_of_two_inputs),
            batch_invariant=self.batch_invariant,
            shared=shared,
            plus_TD=plus_TD,
            of=self.of,
        )

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj[expert], self.down_proj[expert]
        if self.gate_up_proj_scale_inv is not None and self.down_proj_scale_inv is not None:
            halves = zip(gate_up.chunk(2), self.gate_up_proj_scale_inv[expert].chunk(2), strict=True)
            gate_up = torch.cat([dequantize_blocks(half, scales, dtype=x_RD.dtype) for half, scales in halves])
            down = dequantize_blocks(down, self.down_proj_scale_inv[expert], dtype=x_RD.dtype)
        return self.multiply(silu_and_multiply(self.multiply(x_RD, gate_up, None)), down, None)


def run_experts(x_AD: Tensor, experts_TK: Tensor, num_experts: int, one: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Returns the outputs [T,K,D] of each token's experts. For a CPU: the host reads how many tokens each expert has.

    Tokens are sorted by expert, so every expert's weights are read once and never copied. Gathering the chosen experts'
    weights into one batched product saves calls but copies the weights: measured on a CPU it was 10 to 30 % faster up
    to 200,000 gathered numbers, and 1.3 to 9 times slower above.

    Args:
        x_AD: one row per token, or one per assignment.
        experts_TK: places of experts; the outputs of those below 0 are 0.
        one: computes the outputs of an expert, given by its place, for some rows.
    """
    if not len(experts_TK):
        return x_AD.new_empty(*experts_TK.shape, x_AD.shape[1])
    experts_S = experts_TK.flatten()
    order_S = experts_S.argsort()
    x_SD = x_AD[order_S // (len(experts_S) // len(x_AD))]
    elsewhere, *counts = (experts_S + 1).bincount(minlength=num_experts + 1).tolist()
    parts = [one(expert, x_RD) for expert, x_RD in enumerate(torch.split(x_SD[elsewhere:], counts)) if len(x_RD)]
    out_SD = torch.empty_like(x_SD)
    out_SD[order_S] = torch.cat([x_SD.new_zeros(elsewhere, x_SD.shape[1]), *parts])
    return torch.unflatten(out_SD, 0, experts_TK.shape)


def weighted_sum(out_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """Returns the sum of each token's experts in the order of its choices, in float32, rounded once.

    NOTE: this must be no matrix product, because on a CPU the method of a batched product depends on the number of
    tokens.
    """
    wide_TKD, wide_TK1 = widened(out_TKD), widened(weights_TK.to(out_TKD.dtype)).unsqueeze(-1)
    sum_TD = wide_TKD[:, 0] * wide_TK1[:, 0]
    for choice in range(1, out_TKD.shape[1]):
        sum_TD += wide_TKD[:, choice] * wide_TK1[:, choice]
    return sum_TD.to(out_TKD.dtype)
