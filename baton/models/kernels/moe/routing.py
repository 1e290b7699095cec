"""Routing: computes each token's scores over all experts, its chosen experts and their weights.

Two launches: products in float32 precision over parts of the channels, with x in its own dtype, then one program for
each token that adds the parts and chooses. Legend: T token, D hidden channel, E expert, G group, X expert of a group,
K choice of a token, P part of the channels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents

# Channels of a part. Few tokens need short parts to keep the GPU busy; many tokens do with long ones, because each part
# is written to memory and added up again.
_SHORT_PART = 256
_LONG_PART = 1024
_MANY_TOKENS = 1024


@dataclass(frozen=True)
class ExpertChoice:
    """How experts are chosen by their scores.

    Attributes:
        by_logits: experts are ranked by logits, because scores rise with logits; only where scores are not corrected.
        groups_by_two: groups are ranked by the sum of their two best experts, else by the best one.
        mixer_threshold: weights are those of a sparse mixer (`baton.models.config.model_config.TopKMethod`); None:
        scores.
    """

    experts_per_token: int
    num_groups: int
    groups_per_token: int
    sigmoid: bool
    by_logits: bool
    groups_by_two: bool
    normalize_weights: bool
    weight_scale: float
    mixer_threshold: float | None = None


def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    choice: ExpertChoice,
    *,
    bias_E: Tensor | None,
    correction_E: Tensor | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Returns (weights [T,K] float32, experts [T,K] int32), the best first. Among equal scores the first expert wins.

    Args:
        weight_ED: float32, as are the biases.
        batch_invariant: channels are always added up in the same parts.
    """
    logits_PTE = router_logits(x_TD, weight_ED, short_parts=batch_invariant or len(x_TD) < _MANY_TOKENS)
    return choose_experts(logits_PTE, choice, bias_E=bias_E, correction_E=correction_E)


def router_logits(x_TD: Tensor, weight_ED: Tensor, *, short_parts: bool) -> Tensor:
    """Returns parts of the logits, float32 [P,T,E]; their sum over P is the logits."""
    num_tokens, channels = x_TD.shape
    num_experts = len(weight_ED)
    part = _SHORT_PART if short_parts else _LONG_PART
    num_parts = triton.cdiv(channels, part)
    logits_PTE = torch.empty(num_parts, num_tokens, num_experts, dtype=torch.float32, device=x_TD.device)
    if not num_tokens:
        return logits_PTE
    block_t, block_e, block_d = (16, 32, _SHORT_PART) if short_parts else (64, 64, 64)
    _logits[(triton.cdiv(num_tokens, block_t), triton.cdiv(num_experts, block_e), num_parts)](
        x_TD,
        weight_ED,
        logits_PTE,
        num_tokens,
        num_experts,
        x_TD.stride(0),
        weight_ED.stride(0),
        CHANNELS=channels,
        PART=part,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_D=block_d,
        INTERPRETED=interpreted(),
        **overlap(x_TD.device, rows=num_tokens),
        num_warps=4,
        num_stages=3,
    )
    return logits_PTE


def choose_experts(
    logits_PTE: Tensor, choice: ExpertChoice, *, bias_E: Tensor | None, correction_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    num_parts, num_tokens, num_experts = logits_PTE.shape
    shape = (num_tokens, choice.experts_per_token)
    weights_TK = torch.empty(shape, dtype=torch.float32, device=logits_PTE.device)
    experts_TK = torch.empty(shape, dtype=torch.int32, device=logits_PTE.device)
    if not num_tokens:
        return weights_TK, experts_TK
    group_size = num_experts // choice.num_groups
    padded = triton.next_power_of_2(choice.num_groups) * triton.next_power_of_2(group_size)
    _choose[(num_tokens,)](
        logits_PTE,
        bias_E,
        correction_E,
        weights_TK,
        experts_TK,
        num_tokens,
        choice.weight_scale,
        choice.mixer_threshold or 0.0,
        PARTS=num_parts,
        GROUPS=choice.num_groups,
        GROUP_SIZE=group_size,
        BLOCK_G=triton.next_power_of_2(choice.num_groups),
        BLOCK_X=triton.next_power_of_2(group_size),
        CHOSEN_GROUPS=choice.groups_per_token,
        CHOSEN=choice.experts_per_token,
        BLOCK_K=triton.next_power_of_2(choice.experts_per_token),
        SIGMOID=choice.sigmoid,
        BY_LOGITS=choice.by_logits,
        GROUPS_BY_TWO=choice.groups_by_two,
        NORMALIZE=choice.normalize_weights,
        MIXES=choice.mixer_threshold is not None,
        **overlap(logits_PTE.device, rows=num_tokens),
        num_warps=1 if padded <= 512 else 4,
    )
    return weights_TK, experts_TK


@triton.jit(do_not_specialize=["num_tokens"])
def _logits(
    x,
    weight,
    logits,
    num_tokens,
    num_experts,
    x_stride,
    weight_stride,
    CHANNELS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one part for a block of tokens and experts. With OVERLAP a part is a single step, whose weights are read
    before the previous kernel has ended."""
    start_dependents(OVERLAP)
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_token_T1 = (tokens_T < num_tokens)[:, None]
    is_expert_1E = (experts_E < num_experts)[None, :]
    first = tl.program_id(2) * PART
    x_ptrs_T1 = x + tokens_T.to(tl.int64)[:, None] * x_stride
    weight_ptrs_1E = weight + experts_E[None, :] * weight_stride
    logits_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    rest_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(0, PART, BLOCK_D):
        channels_D = first + start + tl.arange(0, BLOCK_D)
        is_channel_D = channels_D < CHANNELS
        weight_DE = tl.load(weight_ptrs_1E + channels_D[:, None], mask=is_expert_1E & is_channel_D[:, None], other=0.0)
        await_predecessors(OVERLAP)
        x_TD = tl.load(x_ptrs_T1 + channels_D[None, :], mask=is_token_T1 & is_channel_D[None, :], other=0.0)
        logits_TE, rest_TE = _add_product(logits_TE, rest_TE, x_TD, weight_DE, INTERPRETED)
    logits_TE += rest_TE
    rows_T1 = (tl.program_id(2) * num_tokens + tokens_T).to(tl.int64)[:, None]
    tl.store(logits + rows_T1 * num_experts + experts_E[None, :], logits_TE, mask=is_token_T1 & is_expert_1E)


@triton.jit
def _add_product(logits_TE, rest_TE, x_TD, weight_DE, INTERPRETED: tl.constexpr):
    """Adds a product in float32 precision as three products on the tensor cores: bfloat16 holds x exactly, and three
    bfloat16 numbers hold a float32 weight. The cores round every sum towards zero, so the small products are summed
    separately, where they lose hardly anything."""
    if x_TD.dtype == tl.bfloat16 and not INTERPRETED:
        high_DE = weight_DE.to(tl.bfloat16)
        below_DE = weight_DE - high_DE.to(tl.float32)
        middle_DE = below_DE.to(tl.bfloat16)
        low_DE = (below_DE - middle_DE.to(tl.float32)).to(tl.bfloat16)
        rest_TE = tl.dot(x_TD, low_DE, rest_TE)
        rest_TE = tl.dot(x_TD, middle_DE, rest_TE)
        logits_TE = tl.dot(x_TD, high_DE, logits_TE)
    else:
        logits_TE = tl.dot(x_TD.to(tl.float32), weight_DE, logits_TE, input_precision="ieee")
    return logits_TE, rest_TE


@triton.jit(do_not_specialize=["num_tokens"])
def _choose(
    logits,
    bias,
    correction,
    weights,
    experts,
    num_tokens,
    weight_scale,
    mixer_threshold,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    GROUPS_BY_TWO: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MIXES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Chooses one token's experts. Chosen experts and padding rank -inf, and so does NaN, which could otherwise give
    the number of an expert that does not exist."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    EXPERTS: tl.constexpr = GROUPS * GROUP_SIZE
    groups_G = tl.arange(0, BLOCK_G)
    within_X = tl.arange(0, BLOCK_X)
    exists_GX = (groups_G < GROUPS)[:, None] & (within_X < GROUP_SIZE)[None, :]
    experts_GX = tl.where(exists_GX, groups_G[:, None] * GROUP_SIZE + within_X[None, :], EXPERTS)
    logits_GX = tl.zeros([BLOCK_G, BLOCK_X], tl.float32)
    for part in tl.static_range(PARTS):
        row = (part * num_tokens + token) * EXPERTS
        logits_GX += tl.load(logits + row + experts_GX, mask=exists_GX, other=0.0)
    if bias is not None:
        logits_GX += tl.load(bias + experts_GX, mask=exists_GX, other=0.0)
    logits_GX = tl.where(exists_GX, logits_GX, -float("inf"))
    if SIGMOID:
        scores_GX = 1.0 / (1.0 + tl.exp(-logits_GX))
    else:
        scores_GX = tl.exp(logits_GX - tl.max(logits_GX))
        scores_GX /= tl.sum(scores_GX)
    ranked_GX = logits_GX if BY_LOGITS else scores_GX
    if correction is not None:
        ranked_GX += tl.load(correction + experts_GX, mask=exists_GX, other=0.0)
    ranked_GX = tl.where(exists_GX & (ranked_GX == ranked_GX), ranked_GX, -float("inf"))
    if not BY_LOGITS and GROUPS > CHOSEN_GROUPS:
        ranked_GX = _rule_out_groups(ranked_GX, groups_G, CHOSEN_GROUPS, GROUPS_BY_TWO)
    choices_K = tl.arange(0, BLOCK_K)
    weights_K = tl.zeros([BLOCK_K], tl.float32)
    experts_K = tl.zeros([BLOCK_K], tl.int32)
    for choice in tl.static_range(CHOSEN):
        # NOTE: no argmax over both axes: it needs a reshape, and Triton lets a reshape before a reduction reorder
        # numbers, which gives wrong places once a thread holds several numbers.
        highest = tl.max(ranked_GX)
        best = tl.min(tl.where(ranked_GX == highest, experts_GX, EXPERTS))
        is_best_GX = experts_GX == best
        experts_K = tl.where(choices_K == choice, best, experts_K)
        if MIXES:
            size_GX = tl.where(exists_GX, tl.maximum(tl.abs(logits_GX), highest), 0.0)
            far_GX = highest - logits_GX > mixer_threshold * size_GX
            weight = 1.0 / tl.sum(tl.where(far_GX, 0.0, tl.exp(ranked_GX - highest)))
        else:
            weight = tl.sum(tl.where(is_best_GX, scores_GX, 0.0))
        weights_K = tl.where(choices_K == choice, weight, weights_K)
        ranked_GX = tl.where(is_best_GX, -float("inf"), ranked_GX)
    if NORMALIZE:
        weights_K /= tl.sum(weights_K) + 1e-20
    tl.store(weights + token * CHOSEN + choices_K, weights_K * weight_scale, mask=choices_K < CHOSEN)
    tl.store(experts + token * CHOSEN + choices_K, experts_K, mask=choices_K < CHOSEN)


@triton.jit
def _rule_out_groups(ranked_GX, groups_G, CHOSEN_GROUPS: tl.constexpr, BY_TWO: tl.constexpr):
    """Ranks the experts of all groups but the best at -inf."""
    worth_G = tl.max(ranked_GX, 1)
    if BY_TWO:
        within_X = tl.arange(0, ranked_GX.shape[1])
        is_best_GX = within_X[None, :] == tl.argmax(ranked_GX, 1)[:, None]
        worth_G += tl.max(tl.where(is_best_GX, -float("inf"), ranked_GX), 1)
    kept_G = groups_G < 0
    for _ in tl.static_range(CHOSEN_GROUPS):
        best = tl.argmax(worth_G, 0)
        kept_G = kept_G | (groups_G == best)
        worth_G = tl.where(groups_G == best, -float("inf"), worth_G)
    return tl.where(kept_G[:, None], ranked_GX, -float("inf"))
