"""Merges attention over two sets of keys in one pass over both outputs. The plain-torch twin is `attention.lse`.

Legend: T tokens, H heads, V value channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, overlap, start_dependents


def merge_attn_states(
    prefix_output_THV: Tensor,
    prefix_lse_HT: Tensor,
    suffix_output_THV: Tensor,
    suffix_lse_HT: Tensor,
    *,
    out: Tensor,
    lse_HT: Tensor | None = None,
    sinks_H: Tensor | None = None,
    prefix_lens_T: Tensor | None = None,
) -> None:
    """Writes attention over prefix and suffix keys together into `out`, which may be either output itself.

    Args:
        prefix_lse_HT, suffix_lse_HT: float32; -inf or +inf: no keys on that side, whose output is then not read.
        out: [T, H, V] of any float type; 0 without keys on both sides.
        lse_HT: float32, merged; may be one of the two.
        sinks_H: float32; an extra score per head, which neither side includes.
        prefix_lens_T: int32; 0: the token has no prefix, and nothing of that side is used for it. None: all have it.
    """
    num_tokens, num_heads, num_channels = out.shape
    if not num_tokens:
        return
    block_v = triton.next_power_of_2(num_channels)
    block_h = min(triton.next_power_of_2(num_heads), max(1, 2048 // block_v))
    _merge[(num_tokens, triton.cdiv(num_heads, block_h))](
        prefix_output_THV,
        prefix_lse_HT,
        suffix_output_THV,
        suffix_lse_HT,
        out,
        lse_HT,
        sinks_H,
        prefix_lens_T,
        num_heads,
        *prefix_output_THV.stride()[:2],
        *prefix_lse_HT.stride(),
        *suffix_output_THV.stride()[:2],
        *suffix_lse_HT.stride(),
        *out.stride()[:2],
        *(lse_HT.stride() if lse_HT is not None else (0, 0)),
        CHANNELS=num_channels,
        BLOCK_H=block_h,
        BLOCK_V=block_v,
        **overlap(out.device, rows=num_tokens),
        num_warps=4,
    )


# A log-sum-exp's stride is the number of tokens.
@triton.jit(
    do_not_specialize=[
        "prefix_lse_stride_H",
        "prefix_lse_stride_T",
        "suffix_lse_stride_H",
        "suffix_lse_stride_T",
        "lse_stride_H",
        "lse_stride_T",
    ]
)
def _merge(
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    out,
    merged_lse,
    sinks,
    prefix_lens,
    num_heads,
    prefix_stride_T,
    prefix_stride_H,
    prefix_lse_stride_H,
    prefix_lse_stride_T,
    suffix_stride_T,
    suffix_stride_H,
    suffix_lse_stride_H,
    suffix_lse_stride_T,
    out_stride_T,
    out_stride_H,
    lse_stride_H,
    lse_stride_T,
    CHANNELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merges BLOCK_H heads of one token."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channels = tl.arange(0, BLOCK_V)
    head_mask = heads < num_heads
    minus_inf = -float("inf")
    prefix = tl.load(
        prefix_lse + heads * prefix_lse_stride_H + token * prefix_lse_stride_T, mask=head_mask, other=minus_inf
    )
    suffix = tl.load(
        suffix_lse + heads * suffix_lse_stride_H + token * suffix_lse_stride_T, mask=head_mask, other=minus_inf
    )
    prefix = tl.where(prefix == float("inf"), minus_inf, prefix)
    if prefix_lens is not None:
        prefix = tl.where(tl.load(prefix_lens + token) > 0, prefix, minus_inf)
    suffix = tl.where(suffix == float("inf"), minus_inf, suffix)
    highest = tl.maximum(prefix, suffix)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=head_mask, other=minus_inf)
        highest = tl.maximum(highest, sink)
    # Without any keys nothing is subtracted: -inf minus -inf is NaN.
    highest = tl.where(highest == minus_inf, 0.0, highest)
    prefix_weight = tl.exp(prefix - highest)
    suffix_weight = tl.exp(suffix - highest)
    total = prefix_weight + suffix_weight
    if sinks is not None:
        total += tl.exp(sink - highest)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    share = 1.0 / total
    channel_mask = (channels < CHANNELS)[None, :]
    prefix_values = tl.load(
        prefix_output + token * prefix_stride_T + heads[:, None] * prefix_stride_H + channels[None, :],
        mask=(prefix > minus_inf)[:, None] & channel_mask,
        other=0.0,
    ).to(tl.float32)
    suffix_values = tl.load(
        suffix_output + token * suffix_stride_T + heads[:, None] * suffix_stride_H + channels[None, :],
        mask=(suffix > minus_inf)[:, None] & channel_mask,
        other=0.0,
    ).to(tl.float32)
    merged = prefix_values * (prefix_weight * share)[:, None] + suffix_values * (suffix_weight * share)[:, None]
    # NOTE: outputs may overwrite inputs, and every warp reads the log-sum-exps: without the barrier a late warp would
    # read the merged one as a side's.
    tl.debug_barrier()
    if merged_lse is not None:
        lse = tl.where(empty, minus_inf, tl.log(total) + highest)
        tl.store(merged_lse + heads * lse_stride_H + token * lse_stride_T, lse, mask=head_mask)
    tl.store(
        out + token * out_stride_T + heads[:, None] * out_stride_H + channels[None, :],
        merged.to(out.dtype.element_ty),
        mask=head_mask[:, None] & channel_mask,
    )
