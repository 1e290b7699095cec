"""Mixture of experts: the router, and the experts as batched tensors.

Shapes: T token, D hidden channel, E expert, G group, K chosen expert of a token, S = T*K assignment,
I intermediate channel, R row of some expert, A row of the input.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from models.config.model_config import MoEConfig, Scoring, TopKMethod
from models.elementwise import sigmoid
from models.expert_counts import LayerCounts
from models.expert_places import LayerPlaces
from models.kernels.decode_matmul import DecodeMultiply
from models.kernels.expert_places import find_places
from models.kernels.grouped_gemm import ExpertWeights, SharedWeights, run_gated_experts
from models.kernels.routing import Choice, route
from models.kernels.zero_experts import given_back
from models.layers import GatedMLP, silu_and_multiply
from models.linear import Linear, Multiply
from models.parallel import ParallelModule
from models.quantization.fp8 import dequantize_blocks

# Up to this many tokens, the launches of routed experts also compute the shared ones, unless the shared experts' first
# product reads more than the bytes below: such products are as fast in launches of their own. Decode steps of
# DeepSeek-V2-Lite on an H200 take 14 % less time this way at 1 token, 4 % at 8, 5 % at 32, 3 % at 64, 1 % at 96, and 0
# to 1 % less beyond; a layer of DeepSeek-V3's size takes 1.4 % longer at 1 token.
_MAX_TOKENS_IN_ONE_LAUNCH = 96
_MAX_BYTES_IN_ONE_LAUNCH = 32 << 20

# Scores rise with logits, and high ones round to the same score where the logits still differ.
_BY_LOGITS = (TopKMethod.GREEDY, TopKMethod.SPARSE_MIXER)


class Router(nn.Module):
    """Chooses experts and their weights, in float32 for every model dtype: close scores must not tie.

    Attributes:
        choice: the config's rule, as the kernels take it.
        multiply: on a CPU, as in `models.linear.Linear`.
        batch_invariant: on a GPU, a token's weights have the same bits in every batch.
    """

    def __init__(self, size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.choice = Choice(
            experts_per_token=moe.experts_per_token,
            num_groups=moe.num_groups,
            groups_per_token=moe.groups_per_token,
            sigmoid=moe.scoring is Scoring.SIGMOID,
            by_logits=moe.method in _BY_LOGITS,
            groups_by_two=moe.method is TopKMethod.NOAUX_TC,
            normalize_weights=moe.normalize_weights,
            weight_scale=moe.weight_scale,
            mixer_threshold=moe.mixer_threshold if moe.method is TopKMethod.SPARSE_MIXER else None,
        )
        self.multiply: Multiply = linear
        self.batch_invariant = False
        num_experts = moe.num_experts + moe.zero_experts
        self.weight = nn.Parameter(torch.empty(num_experts, size, dtype=torch.float32))
        self.bias: nn.Parameter | None = None
        if moe.router_bias:
            self.bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))
        self.e_score_correction_bias: nn.Parameter | None = None
        if moe.method is TopKMethod.NOAUX_TC:
            self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T,K] float32, experts [T,K] integers), the best first."""
        if x_TD.is_cuda:
            return route(
                x_TD,
                self.weight,
                self.choice,
                bias_E=self.bias,
                correction_E=self.e_score_correction_bias,
                batch_invariant=self.batch_invariant,
            )
        logits_TE = self.multiply(x_TD.float(), self.weight, self.bias)
        if self.choice.mixer_threshold is not None:
            weights_TK, experts_TK = mixed_experts(
                logits_TE, self.moe.experts_per_token, threshold=self.choice.mixer_threshold
            )
        else:
            weights_TK, experts_TK = self._best(logits_TE)
        if self.moe.normalize_weights:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_TK * self.moe.weight_scale, experts_TK

    def _best(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and experts [T,K]."""
        scores_TE = sigmoid(logits_TE) if self.moe.scoring is Scoring.SIGMOID else logits_TE.softmax(dim=-1)
        ranked_TE = logits_TE if self.moe.method in _BY_LOGITS else self._rank(scores_TE)
        experts_TK = ranked_TE.topk(self.moe.experts_per_token, dim=-1).indices
        return scores_TE.gather(1, experts_TK), experts_TK

    def _rank(self, scores_TE: Tensor) -> Tensor:
        """The scores that rank experts: `scores_TE`, corrected, and -inf in all groups but the best."""
        if self.e_score_correction_bias is not None:
            scores_TE = scores_TE + self.e_score_correction_bias
        if self.moe.num_groups == self.moe.groups_per_token:
            return scores_TE
        grouped_TGE = torch.unflatten(scores_TE, -1, (self.moe.num_groups, -1))
        if self.moe.method is TopKMethod.NOAUX_TC:
            groups_TG = grouped_TGE.topk(2, dim=-1).values.sum(dim=-1)
        else:
            groups_TG = grouped_TGE.amax(dim=-1)
        best_TG = groups_TG.topk(self.moe.groups_per_token, dim=-1, sorted=False).indices
        ruled_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, best_TG, value=False)
        grouped_TGE = grouped_TGE.masked_fill(ruled_out_TG.unsqueeze(-1), -torch.inf)
        return grouped_TGE.flatten(-2)


def mixed_experts(logits_TE: Tensor, experts_per_token: int, *, threshold: float) -> tuple[Tensor, Tensor]:
    """Weights and experts [T,K] of `TopKMethod.SPARSE_MIXER`."""
    left_TE, weights, experts = logits_TE, [], []
    for _ in range(experts_per_token):
        best_T1, expert_T1 = left_TE.max(dim=-1, keepdim=True)
        far_TE = best_T1 - logits_TE > threshold * logits_TE.abs().clamp(min=best_T1)
        near_TE = left_TE.masked_fill(far_TE, -torch.inf)
        weights.append(near_TE.softmax(dim=-1).gather(1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(1, expert_T1, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(experts, dim=1)


class RoutedExperts(nn.Module):
    """A layer's experts, or those that one rank holds: it computes these for all tokens, and the ranks' sum is whole.

    Args:
        zero_experts: how many more experts have no weights, and are computed elsewhere.

    Attributes:
        held: their numbers, in the order of memory.
        of: the number of all experts; None: all are held, and no other rank has any.
        own: the rank's places among those of all ranks (`models.expert_places.LayerPlaces`).
        turns_EC: int32, the places of each expert's copies, on the ranks in turn; None with `of`.
        copies_E: int32, how many copies each expert has.
        counts: gets the tokens of each place of this layer; None: they are not counted.
        adapted: computes `forward` with the adapters of experts, or gives None in a step without adapters
            (`models.adapters.experts`); None: the experts have no slots for adapters.
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
        self.register_buffer("turns_EC", None, persistent=False)
        self.register_buffer("copies_E", None, persistent=False)
        self.locate()

    def locate(self) -> None:
        """Makes the tables of consecutive experts without copies, on the current device."""
        if self.of is not None:
            self._set_turns([(expert,) for expert in range(self.of - self._zero_experts)])

    def place(self, places: LayerPlaces, rank: int) -> None:
        """Makes this the rank's part of a plan, with its tables on the current device. Memory is as it was: as many
        experts as the rank has places."""
        assert len(self.held) == len(places.ranks[rank])
        self.held, self.of = places.ranks[rank], len(places.turns) + self._zero_experts
        self.own = range(places.first(rank), places.first(rank) + len(self.held))
        self._set_turns(places.turns)

    def take_places_of(self, other: "RoutedExperts") -> None:
        """For experts that replace others."""
        self.held, self.of, self.own, self._zero_experts = other.held, other.of, other.own, other._zero_experts
        self.turns_EC, self.copies_E, self.counts = other.turns_EC, other.copies_E, other.counts

    def _set_turns(self, turns: Sequence[tuple[int, ...]]) -> None:
        turns = [*turns, *[(-1,)] * self._zero_experts]
        most = max(map(len, turns))
        self.turns_EC = torch.tensor([(*each, *each[:1] * (most - len(each))) for each in turns], dtype=torch.int32)
        self.copies_E = torch.tensor([len(each) for each in turns], dtype=torch.int32)

    def places(self, experts_TK: Tensor) -> Tensor:
        """Places in memory of the chosen experts; -1: of another rank. Counts the step's tokens."""
        if self.turns_EC is None or self.copies_E is None:
            return experts_TK
        slots_T = None if self.counts is None else self.counts.of_model.slots_T
        counts_P = None if self.counts is None or slots_T is None else self.counts.tokens_P
        assert slots_T is None or len(slots_T) == len(experts_TK), "the slots are those of the step's rows"
        if experts_TK.is_cuda:
            return find_places(
                experts_TK, self.turns_EC, self.copies_E, own=self.own, counts_P=counts_P, slots_T=slots_T
            )
        rows_T1 = torch.arange(len(experts_TK)).unsqueeze(1)
        places_TK = self.turns_EC[experts_TK, rows_T1 % self.copies_E[experts_TK]]
        if counts_P is not None and slots_T is not None:
            counted_S = places_TK[slots_T >= 0].flatten()
            counts_P += counted_S[counted_S >= 0].bincount(minlength=len(counts_P))
        is_own_TK = (places_TK >= self.own.start) & (places_TK < self.own.stop)
        return torch.where(is_own_TK, places_TK - self.own.start, -1)


class Experts(RoutedExperts):
    """All experts of a layer, or one rank's.

    Attributes:
        gate_up_proj_scale_inv: where `gate_up_proj` is fp8, float32 [E, rows, columns] of blocks of 128x128 numbers,
            the gate's rows before the up's; a weight is number * scale. As is `down_proj_scale_inv`.
        multiply: on a CPU, as in `models.linear.Linear`.
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
        self.batch_invariant = False

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """(tensor name in the checkpoint, relative to this module; what it fills)."""
        for expert, gate_up, down in zip(self.held, self.gate_up_proj.data, self.down_proj.data, strict=True):
            gate, up = gate_up.chunk(2)
            yield f"{expert}.gate_proj.weight", gate
            yield f"{expert}.up_proj.weight", up
            yield f"{expert}.down_proj.weight", down

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, plus_TD: Tensor | None = None) -> Tensor:
        """
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
        """`forward` on a GPU, with the `shared` experts in the same launches. The host waits for nothing."""
        return run_gated_experts(
            x_TD,
            weights_TK,
            self.places(experts_TK),
            ExpertWeights(self.gate_up_proj, scales=self.gate_up_proj_scale_inv),
            ExpertWeights(self.down_proj, scales=self.down_proj_scale_inv),
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
    """The outputs [T,K,D] of each token's experts, on a CPU: the host reads how many tokens each expert has.

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
    """The sum of each token's experts, always in the same order, independent of other tokens in the batch."""
    return torch.einsum("tkd,tk->td", out_TKD, weights_TK.to(out_TKD.dtype))


class MoE(ParallelModule):
    """Routed experts plus, where the model has them, experts that every token goes through, each token to a degree of
    its own where they have a gate."""

    def __init__(self, size: int, moe: MoEConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Router(size, moe)
        self.experts = Experts(
            moe.num_experts,
            size,
            moe.intermediate_size,
            dtype=dtype,
            held=moe.held,
            zero_experts=moe.zero_experts,
        )
        self.zero_numbers = moe.zero_numbers
        self.shared_experts = (
            GatedMLP(size, moe.shared_intermediate_size, dtype=dtype) if moe.shared_intermediate_size else None
        )
        self.shared_expert_gate = Linear(size, 1, dtype=dtype) if moe.shared_gate else None

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, experts_TK = self.gate(x_TD)
        plus_TD = self._given_back(x_TD, weights_TK, experts_TK)
        shared = self.shared_weights(len(x_TD)) if x_TD.is_cuda else None
        if shared is not None:
            return self.experts.run_grouped(x_TD, weights_TK, experts_TK, shared=shared, plus_TD=plus_TD)
        if (shared_TD := self._shared(x_TD)) is not None:
            plus_TD = shared_TD if plus_TD is None else plus_TD + shared_TD
        out_TD: Tensor = self.experts(x_TD, weights_TK, experts_TK, plus_TD=plus_TD)
        return out_TD

    def _given_back(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor | None:
        """The sum of the experts that give their input back: the first rank's part of it, which is the whole."""
        if not self.zero_numbers or self.parallel.rank > 0:
            return None
        if x_TD.is_cuda:
            return given_back(x_TD, weights_TK, experts_TK, first=self.zero_numbers.start)
        return given_back_in_torch(x_TD, weights_TK, experts_TK, first=self.zero_numbers.start)

    def _shared(self, x_TD: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        out_TD: Tensor = self.shared_experts(x_TD)
        if self.shared_expert_gate is None:
            return out_TD
        return out_TD * sigmoid(self.shared_expert_gate(x_TD).float()).to(x_TD.dtype)

    def shared_weights(self, num_tokens: int) -> SharedWeights | None:
        """The shared experts' weights if the launches of routed experts also compute them, else None.

        They do for few tokens, where the shared experts are small, are a multiple of a routed expert's size (one rank's
        part of them may not be), and have no gate, bias, scales or activation that routed experts lack, and no
        adapters, which routed experts do not have either then.
        """
        experts, mlp = self.experts, self.shared_experts
        if mlp is None or self.shared_expert_gate is not None or experts.adapted is not None:
            return None
        if num_tokens > _MAX_TOKENS_IN_ONE_LAUNCH or experts.batch_invariant:
            return None
        if mlp.activate is not silu_and_multiply or mlp.down_proj.in_features % experts.down_proj.shape[2]:
            return None
        layers = (mlp.gate_up_proj, mlp.down_proj)
        if any(layer.bias is not None or layer.has_adapters or not _is_plain(layer.multiply) for layer in layers):
            return None
        if mlp.gate_up_proj.weight.nbytes > _MAX_BYTES_IN_ONE_LAUNCH:
            return None
        weights = (experts.gate_up_proj, experts.down_proj, *(layer.weight for layer in layers))
        if {weight.dtype for weight in weights} not in ({torch.bfloat16}, {torch.float16}):
            return None
        return SharedWeights(mlp.gate_up_proj.weight, mlp.down_proj.weight)


def given_back_in_torch(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, first: int) -> Tensor:
    """As `models.kernels.zero_experts.given_back`."""
    share_T1 = weights_TK.masked_fill(experts_TK < first, 0).sum(dim=-1, keepdim=True)
    return (x_TD.float() * share_T1).to(x_TD.dtype)


def _is_plain(multiply: Multiply) -> bool:
    """Whether it multiplies unquantized numbers and does nothing else."""
    return multiply is linear or isinstance(multiply, DecodeMultiply)
