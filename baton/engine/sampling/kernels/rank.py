"""Numbers that order a row's tokens: the larger logit first, and the lower id first among equal logits. No two tokens
share a number, so a maximum does not depend on the order of reduction.

A rank is an int64 that holds the logit above `ID_BITS` bits of the inverted token id.
"""

import triton
import triton.language as tl

# Distance between the ranks of one token at neighbouring float32 logits.
RANKS_PER_LOGIT = 1 << 20
ID_BITS = tl.constexpr(20)
LAST_ID = tl.constexpr((1 << 20) - 1)
LOWEST_RANK = tl.constexpr(-(1 << 51))
NO_RANK = tl.constexpr(-(1 << 51) - 1)


@triton.jit
def rank_of(logits, token_ids):
    """The ranks of float32 logits and int32 token ids. NaN ranks above all numbers, as in torch; -0.0 equals 0.0."""
    bits = logits.to(tl.int32, bitcast=True)
    # Among negative numbers the larger one has the smaller bits.
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(logits == 0.0, 0, bits)
    bits = tl.where(logits != logits, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << ID_BITS) + (token_ids ^ LAST_ID).to(tl.int64)


@triton.jit
def logit_of(rank):
    bits = (rank >> ID_BITS).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(rank):
    return (rank & LAST_ID).to(tl.int32) ^ LAST_ID


@triton.jit
def token_if_finite(rank, top_rank):
    """The token of `rank`; -1 if the row's best rank shows that its logits are not finite: NaN ranks above all numbers,
    and only a row without a token to choose has -inf at the top."""
    # NOTE: a comparison with NaN is false.
    return tl.where(tl.abs(logit_of(top_rank)) < float("inf"), token_of(rank), -1)
