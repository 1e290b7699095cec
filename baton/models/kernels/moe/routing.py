"""Routing: computes each token's scores over all experts, its chosen experts and their weights.

Two launches: products in float32 precision over parts of the channels, with x in its own dtype, then `expert_choice`,
which adds the parts and chooses. Legend: T token, D hidden channel, E expert, K choice of a token, P part of the
channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.moe.expert_choice import ExpertChoice, choose_experts
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents

# Channels of a part. Few tokens need short parts to keep the GPU busy; many tokens do with long ones, because each part
# is written to memory and added up again.
_SHORT_PART = 256
_LONG_PART = 1024
_MANY_TOKENS = 1024
# On an H200, 8192 tokens, 2048 channels and 512 experts take 125 us in blocks of 256 tokens and 181 us in blocks of 64;
# 1024 tokens take 34 us and 25 us.
_VERY_MANY_TOKENS = 4096


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
        weight_ED: float32, or bfloat16 if x is; biases are float32.
        batch_invariant: channels are always added up in the same parts.
    """
    logits_PTE = router_logits(x_TD, weight_ED, short_parts=batch_invariant or len(x_TD) < _MANY_TOKENS)
    return choose_experts(logits_PTE, choice, bias_E=bias_E, correction_E=correction_E)


def route_with_gate(
    x_TD: Tensor,
    weight_ED: Tensor,
    choice: ExpertChoice,
    gate_1D: Tensor,
    *,
    bias_E: Tensor | None,
    correction_E: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Does what `route` does, and also returns the sigmoid of each token's product with `gate_1D`,
    float32 [T], which is not rounded."""
    parts_PT = x_TD.new_empty(triton.cdiv(x_TD.shape[1], _SHORT_PART), len(x_TD), dtype=torch.float32)
    gates_T = x_TD.new_empty(len(x_TD), dtype=torch.float32)
    logits_PTE = router_logits(x_TD, weight_ED, short_parts=True, gate_1D=gate_1D, gate_parts_PT=parts_PT)
    weights_TK, experts_TK = choose_experts(
        logits_PTE, choice, bias_E=bias_E, correction_E=correction_E, gate_parts_PT=parts_PT, gates_T=gates_T
    )
    return weights_TK, experts_TK, gates_T


def router_logits(
    x_TD: Tensor,
    weight_ED: Tensor,
    *,
    short_parts: bool,
    gate_1D: Tensor | None = None,
    gate_parts_PT: Tensor | None = None,
) -> Tensor:
    """Returns parts of the logits, float32 [P,T,E]; their sum over P is the logits.

    Args:
        gate_1D: another vector, contiguous, whose products with x are stored in `gate_parts_PT`. Only in short parts.
    """
    assert short_parts or gate_1D is None
    num_tokens, channels = x_TD.shape
    num_experts = len(weight_ED)
    part = _SHORT_PART if short_parts else _LONG_PART
    num_parts = triton.cdiv(channels, part)
    logits_PTE = torch.empty(num_parts, num_tokens, num_experts, dtype=torch.float32, device=x_TD.device)
    if not num_tokens:
        return logits_PTE
    block_t, block_e, block_d, num_warps = _block(num_tokens, short_parts=short_parts, dtype=weight_ED.dtype)
    blocks = triton.cdiv(num_experts, block_e) + (gate_1D is not None)
    _logits[(triton.cdiv(num_tokens, block_t), blocks, num_parts)](
        x_TD,
        weight_ED,
        gate_1D,
        logits_PTE,
        gate_parts_PT,
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
        num_warps=num_warps,
        num_stages=3,
    )
    return logits_PTE


def _block(num_tokens: int, *, short_parts: bool, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Returns tokens, experts, channels and warps of a block."""
    if short_parts:
        return 16, 32, _SHORT_PART, 4
    if dtype == torch.bfloat16:
        return (128, 128, 64, 8) if num_tokens >= _VERY_MANY_TOKENS else (64, 64, 64, 4)
    return (256, 64, 64, 8) if num_tokens >= _VERY_MANY_TOKENS else (64, 64, 64, 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _logits(
    x,
    weight,
    gate,
    logits,
    gate_parts,
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
    before the previous kernel has ended. With a gate, the last block is that of the gate, also in a single step."""
    start_dependents(OVERLAP)
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_token_T1 = (tokens_T < num_tokens)[:, None]
    is_expert_1E = (experts_E < num_experts)[None, :]
    first = tl.program_id(2) * PART
    x_ptrs_T1 = x + tokens_T.to(tl.int64)[:, None] * x_stride
    if gate is not None and tl.program_id(1) == tl.num_programs(1) - 1:
        channels_D = first + tl.arange(0, BLOCK_D)
        is_channel_D = channels_D < CHANNELS
        gate_D = tl.load(gate + channels_D, mask=is_channel_D, other=0.0).to(tl.float32)
        await_predecessors(OVERLAP)
        x_TD = tl.load(x_ptrs_T1 + channels_D[None, :], mask=is_token_T1 & is_channel_D[None, :], other=0.0)
        gate_T = tl.sum(x_TD.to(tl.float32) * gate_D[None, :], 1)
        tl.store(gate_parts + tl.program_id(2) * num_tokens + tokens_T, gate_T, mask=tokens_T < num_tokens)
        return
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
    if weight_DE.dtype == tl.bfloat16 and not INTERPRETED:
        logits_TE = tl.dot(x_TD, weight_DE, logits_TE)
    elif x_TD.dtype == tl.bfloat16 and not INTERPRETED:
        high_DE = weight_DE.to(tl.bfloat16)
        below_DE = weight_DE - high_DE.to(tl.float32)
        middle_DE = below_DE.to(tl.bfloat16)
        low_DE = (below_DE - middle_DE.to(tl.float32)).to(tl.bfloat16)
        rest_TE = tl.dot(x_TD, low_DE, rest_TE)
        rest_TE = tl.dot(x_TD, middle_DE, rest_TE)
        logits_TE = tl.dot(x_TD, high_DE, logits_TE)
    else:
        logits_TE = tl.dot(x_TD.to(tl.float32), weight_DE.to(tl.float32), logits_TE, input_precision="ieee")
    return logits_TE, rest_TE
