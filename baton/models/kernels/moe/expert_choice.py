"""Chooses each token's experts by their logits, one program for each token.

Legend: T token, E expert, G group, X expert of a group, K choice of a token, P part of the channels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, overlap, start_dependents

# Below every expert's key.
_LOWEST = tl.constexpr(-(1 << 63))


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


def choose_experts(
    logits_PTE: Tensor,
    choice: ExpertChoice,
    *,
    bias_E: Tensor | None,
    correction_E: Tensor | None,
    gate_parts_PT: Tensor | None = None,
    gates_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what `route` does. With `gate_parts_PT`, sigmoids of their sums are stored in `gates_T`."""
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
        gate_parts_PT,
        weights_TK,
        experts_TK,
        gates_T,
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
def _choose(
    logits,
    bias,
    correction,
    gate_parts,
    weights,
    experts,
    gates,
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
    """Chooses one token's experts. Chosen experts and padding come last, and so does NaN, which could otherwise give
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
        total = tl.sum(scores_GX)
        scores_GX /= total
    ranked_GX = logits_GX if BY_LOGITS else scores_GX
    if correction is not None:
        ranked_GX += tl.load(correction + experts_GX, mask=exists_GX, other=0.0)
    ranked_GX = tl.where(exists_GX & (ranked_GX == ranked_GX), ranked_GX, -float("inf"))
    if not BY_LOGITS and GROUPS > CHOSEN_GROUPS:
        ranked_GX = _rule_out_groups(ranked_GX, groups_G, CHOSEN_GROUPS, GROUPS_BY_TWO)
    choices_K = tl.arange(0, BLOCK_K)
    weights_K = tl.zeros([BLOCK_K], tl.float32)
    experts_K = tl.zeros([BLOCK_K], tl.int32)
    keys_GX = _keys(ranked_GX, experts_GX)
    for choice in tl.static_range(CHOSEN):
        best_key = tl.max(keys_GX)
        best, highest = _expert_and_rank(best_key)
        experts_K = tl.where(choices_K == choice, best, experts_K)
        if MIXES:
            size_GX = tl.where(exists_GX, tl.maximum(tl.abs(logits_GX), highest), 0.0)
            far_GX = highest - logits_GX > mixer_threshold * size_GX
            weight = 1.0 / tl.sum(tl.where(far_GX, 0.0, tl.exp(ranked_GX - highest)))
            ranked_GX = tl.where(experts_GX == best, -float("inf"), ranked_GX)
        elif BY_LOGITS:
            weight = highest
        else:
            weight = tl.sum(tl.where(experts_GX == best, scores_GX, 0.0))
        weights_K = tl.where(choices_K == choice, weight, weights_K)
        keys_GX = tl.where(keys_GX == best_key, _LOWEST, keys_GX)
    if BY_LOGITS and not MIXES:
        if SIGMOID:
            weights_K = 1.0 / (1.0 + tl.exp(-weights_K))
        else:
            weights_K = tl.exp(weights_K - tl.max(logits_GX)) / total
        weights_K = tl.where(choices_K < CHOSEN, weights_K, 0.0)
    if NORMALIZE:
        weights_K /= tl.sum(weights_K) + 1e-20
    tl.store(weights + token * CHOSEN + choices_K, weights_K * weight_scale, mask=choices_K < CHOSEN)
    tl.store(experts + token * CHOSEN + choices_K, experts_K, mask=choices_K < CHOSEN)
    if gate_parts is not None:
        gate = 0.0
        for part in tl.static_range(PARTS):
            gate += tl.load(gate_parts + part * num_tokens + token)
        tl.store(gates + token, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit
def _keys(ranked_GX, experts_GX):
    """Returns numbers that order experts by rank, and of equal ranks the first expert highest. So each choice takes one
    reduction."""
    bits_GX = tl.where(ranked_GX == 0.0, 0.0, ranked_GX).to(tl.int32, bitcast=True)
    ordered_GX = tl.where(bits_GX < 0, bits_GX ^ 0x7FFFFFFF, bits_GX)
    return (ordered_GX.to(tl.int64) << 32) | (0x7FFFFFFF - experts_GX).to(tl.int64)


@triton.jit
def _expert_and_rank(key):
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32), bits.to(tl.float32, bitcast=True)


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
