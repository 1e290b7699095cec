"""Merges attention over two sets of keys into attention over both. Legend: T tokens, H heads, V value channels."""

import torch
from torch import Tensor

from attention.kernels import merge


def merge_attn_states(
    prefix_output_THV: Tensor,
    prefix_lse_HT: Tensor,
    suffix_output_THV: Tensor,
    suffix_lse_HT: Tensor,
    *,
    out: Tensor,
    lse_HT: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    """Writes output, and log-sum-exp if given, over prefix and suffix keys together; `out` may be either side's output.
    On a GPU one kernel does it.

    A side without keys has log-sum-exp -inf, or +inf as some libraries write it, and its output is ignored; without
    keys on both sides the output is 0 and the merged log-sum-exp -inf.
    Section 2.2 of "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving".

    Args:
        sinks_H: an extra score per head, which neither side includes.
    """
    if out.is_cuda:
        merge.merge_attn_states(
            prefix_output_THV,
            prefix_lse_HT,
            suffix_output_THV,
            suffix_lse_HT,
            out=out,
            lse_HT=lse_HT,
            sinks_H=sinks_H,
        )
        return
    # NOTE: contiguous copies. torch's vectorised and scalar results differ in the last bit, and strides decide which
    # numbers are computed as scalars, so without copies a request's bits would depend on its neighbours.
    prefix_lse_HT, suffix_lse_HT = _finite_or_empty(prefix_lse_HT), _finite_or_empty(suffix_lse_HT)
    merged_HT = torch.logaddexp(prefix_lse_HT, suffix_lse_HT)
    if sinks_H is not None:
        merged_HT = torch.logaddexp(merged_HT, sinks_H[:, None])
    # NOTE: -inf minus -inf is NaN, hence the clamp: both weights are then exp(-inf) = 0.
    subtracted_HT = merged_HT.clamp_min(torch.finfo(merged_HT.dtype).min)
    prefix_THV = _weighted(prefix_output_THV, prefix_lse_HT, subtracted_HT)
    torch.add(prefix_THV, _weighted(suffix_output_THV, suffix_lse_HT, subtracted_HT), out=out)
    if lse_HT is not None:
        lse_HT.copy_(merged_HT)


def _finite_or_empty(lse_HT: Tensor) -> Tensor:
    return torch.where(lse_HT == torch.inf, -torch.inf, lse_HT).contiguous()


def _weighted(output_THV: Tensor, lse_HT: Tensor, merged_lse_HT: Tensor) -> Tensor:
    weight_TH1 = torch.exp(lse_HT - merged_lse_HT).t().unsqueeze(-1)
    return torch.where(weight_TH1 > 0, output_THV * weight_TH1, 0.0)
