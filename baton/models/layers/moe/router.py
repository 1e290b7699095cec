"""The router of a mixture of experts, which chooses each token's experts and their weights.

Shapes: T token, D hidden channel, E expert, G group, K chosen expert of a token.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from baton.models.config.model_config import MoEConfig, Scoring, TopKMethod
from baton.models.kernels.moe.expert_choice import ExpertChoice
from baton.models.kernels.moe.routing import route, route_with_gate
from baton.models.layers.elementwise import sigmoid
from baton.models.layers.linear import Multiply

# Scores rise with logits, and different high logits can round to the same score.
_BY_LOGITS = (TopKMethod.GREEDY, TopKMethod.SPARSE_MIXER)


class Router(nn.Module):
    """Chooses experts and their weights, in float32 for every model dtype: close scores must not tie.

    Attributes:
        choice: the config's rule, as the kernels take it.
        multiply: on a CPU, as in `baton.models.layers.linear.Linear`.
        batch_invariant: on a GPU, a token's weights have the same bits in every batch.
        exact_ED: the weight in bfloat16, if that is what the checkpoint has: a third of the products of float32.
    """

    exact_ED: Tensor | None

    def __init__(self, size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.choice = ExpertChoice(
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
        self.register_buffer("exact_ED", None, persistent=False)
        self.bias: nn.Parameter | None = None
        if moe.router_bias:
            self.bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))
        self.e_score_correction_bias: nn.Parameter | None = None
        if moe.method is TopKMethod.NOAUX_TC:
            self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))

    def process_weights_after_loading(self) -> None:
        """Keeps the weight in bfloat16 too, if it loses nothing."""
        rounded_ED = self.weight.detach().bfloat16()
        self.exact_ED = rounded_ED if torch.equal(rounded_ED.float(), self.weight) else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (weights [T,K] float32, experts [T,K] integers), the best first."""
        if x_TD.is_cuda:
            return route(
                x_TD,
                self._weight_for(x_TD),
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

    def with_gate(self, x_TD: Tensor, gate_1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs `forward` on a GPU, and also returns sigmoids [T] of their products with `gate_1D`."""
        return route_with_gate(
            x_TD,
            self._weight_for(x_TD),
            self.choice,
            gate_1D,
            bias_E=self.bias,
            correction_E=self.e_score_correction_bias,
        )

    def _weight_for(self, x_TD: Tensor) -> Tensor:
        return self.weight if self.exact_ED is None or x_TD.dtype != torch.bfloat16 else self.exact_ED

    def _best(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scores and experts [T,K]."""
        scores_TE = sigmoid(logits_TE) if self.moe.scoring is Scoring.SIGMOID else logits_TE.softmax(dim=-1)
        ranked_TE = logits_TE if self.moe.method in _BY_LOGITS else self._rank(scores_TE)
        experts_TK = ranked_TE.topk(self.moe.experts_per_token, dim=-1).indices
        return scores_TE.gather(1, experts_TK), experts_TK

    def _rank(self, scores_TE: Tensor) -> Tensor:
        """Returns the scores that rank experts: `scores_TE`, corrected, and -inf in all groups but the best."""
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
    """Returns weights and experts [T,K] by `TopKMethod.SPARSE_MIXER`."""
    left_TE, weights, experts = logits_TE, [], []
    for _ in range(experts_per_token):
        best_T1, expert_T1 = left_TE.max(dim=-1, keepdim=True)
        far_TE = best_T1 - logits_TE > threshold * logits_TE.abs().clamp(min=best_T1)
        near_TE = left_TE.masked_fill(far_TE, -torch.inf)
        weights.append(near_TE.softmax(dim=-1).gather(1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(1, expert_T1, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(experts, dim=1)
