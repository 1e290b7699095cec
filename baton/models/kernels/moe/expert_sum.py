"""Adds up each token's experts, in the last launch of a layer's experts. Legend: N channel."""

import triton
import triton.language as tl

from baton.tritonlib.launch import await_predecessors, start_dependents


@triton.jit(do_not_specialize=["num_tokens"])
def sum_choices(
    parts,
    plus,
    experts,
    out,
    num_tokens,
    plus_stride,
    CHOICES: tl.constexpr,
    SHARED: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sums a token's experts, always in the order of its choices, then the shared ones, then its row of `plus`. With
    `experts`, rows of choices below 0 were not computed and do not count."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists_N = channels_N < CHANNELS
    sum_N = tl.zeros([BLOCK], tl.float32)
    for nth in tl.static_range(CHOICES + SHARED):
        row = token * CHOICES + nth if nth < CHOICES else num_tokens * nth + token
        counts_N = exists_N
        if experts is not None and nth < CHOICES:
            counts_N = exists_N & (tl.load(experts + token * CHOICES + nth) >= 0)
        sum_N += tl.load(parts + row * CHANNELS + channels_N, mask=counts_N, other=0.0).to(tl.float32)
    if plus is not None:
        sum_N += tl.load(plus + token * plus_stride + channels_N, mask=exists_N, other=0.0).to(tl.float32)
    tl.store(out + token * CHANNELS + channels_N, sum_N.to(out.dtype.element_ty), mask=exists_N)
