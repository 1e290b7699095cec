"""Merging attention over two sets of keys into attention over both. Legend: T tokens, H heads, V value channels."""

import torch
from torch import Tensor


def merge_attn_states(
    prefix_output_THV: Tensor, prefix_lse_HT: Tensor, suffix_output_THV: Tensor, suffix_lse_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over prefix and suffix keys together; float32 in, float32 out.

    A side without keys has log-sum-exp -inf, and its output does not count; without keys on both sides the output is 0.
    Section 2.2 of "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving".
    """
    lse_HT = torch.logaddexp(prefix_lse_HT, suffix_lse_HT)
    # NOTE: -inf minus -inf is NaN, hence the clamp: both weights are then exp(-inf) = 0.
    floor = torch.finfo(lse_HT.dtype).min
    prefix_weight_TH1 = torch.exp(prefix_lse_HT - lse_HT.clamp_min(floor)).t().unsqueeze(-1)
    suffix_weight_TH1 = torch.exp(suffix_lse_HT - lse_HT.clamp_min(floor)).t().unsqueeze(-1)
    return prefix_output_THV * prefix_weight_TH1 + suffix_output_THV * suffix_weight_TH1, lse_HT
