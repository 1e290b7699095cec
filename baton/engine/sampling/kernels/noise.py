"""The noise of `baton.engine.sampling.random` inside a kernel: equal words, and variates that differ in their last
bits."""

import triton
import triton.language as tl

_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def noise_words(seed, position, first_id, TOKENS: tl.constexpr):
    """uint32 of `TOKENS` neighbouring token ids; `first_id` and `TOKENS` are multiples of 4."""
    groups = first_id // 4 + tl.arange(0, TOKENS // 4)
    zeros = groups * 0
    word_0, word_1, word_2, word_3 = tl.philox(seed, groups, zeros + position.to(tl.int32), zeros, zeros)
    return tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))


@triton.jit
def exponential_of(words):
    """Exponential(1) variates in float32; above 1e-10, below 17."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_BELOW_ONE)
    # log(1 - uniform), where the quotient corrects the rounding of the difference.
    rest = 1.0 - uniform
    difference = tl.where(rest == 1.0, -1.0, rest - 1.0)
    return tl.where(rest == 1.0, uniform, tl.log(rest) * tl.div_rn(uniform, difference))
