"""Finds where `top_k` and `top_p` cut a row: the lowest rank that stays. One program per row finds it by bisection. The
result is exact: it counts tokens and adds probabilities as integers, so the order of addition does not matter.

Legend: S slices of the vocabulary, A slices that are read at once, I tokens of a slice.
"""

import triton
import triton.language as tl

from baton.engine.sampling.kernels.rank import (
    LOWEST_RANK,
    NO_RANK,
    RANKS_PER_LOGIT,
    logit_of,
    rank_of,
    token_if_finite,
    token_of,
)
from baton.tritonlib.launch import bound

_LOG2_E = tl.constexpr(1.4426950408889634)
# The probability of the most probable token as an integer: 2**20 tokens sum to less than 2**63.
_UNIT = tl.constexpr(2.0**40)
_FOUR_STEPS = tl.constexpr(4 * RANKS_PER_LOGIT)

# The alignment of these pointers depends on the number of rows; it must not cause a new compilation.
ROW_POINTERS = (
    "best_ptr",
    "sorted_ptr",
    "drawn_ptr",
    "top_ptr",
    "cut_ptr",
    "out_ptr",
    "temperature_ptr",
    "min_p_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "seed_ptr",
    "output_index_ptr",
)


@triton.jit(do_not_specialize=["slices"], do_not_specialize_on_alignment=ROW_POINTERS)
def cut_kernel(
    logits_ptr,
    best_ptr,
    sorted_ptr,
    top_ptr,
    cut_ptr,
    out_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    stride_R,
    vocab_size,
    slices,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Writes each row's best rank, its lowest rank that stays, and the token of a greedy row.

    `best_ptr` [R, S] holds each slice's best rank; `sorted_ptr` [R, S] is scratch memory.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    offsets_S = tl.arange(0, SLICES)
    best_S = tl.load(best_ptr + row * slices + offsets_S, mask=offsets_S < slices, other=NO_RANK)
    top_rank = tl.max(best_S, axis=0)
    tl.store(top_ptr + row, top_rank)
    if temperature == 0:
        tl.store(out_ptr + row, token_if_finite(top_rank, top_rank))
    cut = tl.full((), LOWEST_RANK, tl.int64)
    by_count = (top_k > 0) & (top_k < vocab_size)
    if (temperature > 0) & (by_count | (top_p < 1)):
        _sort(best_ptr + row * slices, sorted_ptr + row * slices, best_S, slices, SLICES, INTERPRETED)
        scale = tl.div_rn(_LOG2_E, temperature)
        ours = (logits_ptr + row * stride_R, sorted_ptr + row * slices, best_S, logit_of(top_rank), scale, vocab_size)
        count = tl.zeros((), tl.int32) + vocab_size
        if by_count:
            if top_k <= slices:
                # At least `slices` tokens reach the lowest of the slices' best ranks, one of each slice.
                cut = tl.min(tl.where(offsets_S < slices, best_S, top_rank), axis=0)
                count, _ = _tally(ours, cut, SLICE, AT_ONCE, False, INTERPRETED)
            cut = _search(ours, cut, count, top_rank, top_k, SLICE, AT_ONCE, False, INTERPRETED)
            count = top_k
        if top_p < 1:
            _, mass = _tally(ours, cut, SLICE, AT_ONCE, True, INTERPRETED)
            goal = mass.to(tl.float64) * top_p.to(tl.float64)
            if not by_count:
                guess = _guess(logit_of(top_rank), temperature, top_p, vocab_size)
                guess_count, mass = _tally(ours, guess, SLICE, AT_ONCE, True, INTERPRETED)
                if mass.to(tl.float64) >= goal:
                    cut = guess
                    count = guess_count
            cut = _search(ours, cut, count, top_rank, goal, SLICE, AT_ONCE, True, INTERPRETED)
    tl.store(cut_ptr + row, tl.minimum(cut, top_rank))


@triton.jit
def _sort(best_ptr, sorted_ptr, best_S, slices, SLICES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Sorts the slices best first. Each slice counts the slices with a better rank."""
    COMPARED: tl.constexpr = 32
    places_S = tl.zeros((SLICES,), tl.int32)
    for first in range(0, bound(slices, INTERPRETED), COMPARED):
        others = first + tl.arange(0, COMPARED)
        best = tl.load(best_ptr + others, mask=others < slices, other=NO_RANK)
        places_S += tl.sum((best[:, None] > best_S[None, :]).to(tl.int32), axis=0)
    tl.store(sorted_ptr + places_S, best_S, mask=tl.arange(0, SLICES) < slices)
    # Threads read what other threads have stored.
    tl.debug_barrier()


@triton.jit
def _guess(top, temperature, top_p, vocab_size):
    """A rank below the cut: all tokens below it together have less probability than `top_p` drops."""
    distance = tl.log(vocab_size.to(tl.float32) / (1.0 - top_p)) + 1.0
    rank = rank_of(top - distance * temperature, tl.zeros((), tl.int32))
    # Rounding moves the difference by one step of float32, which is far at a low temperature.
    return rank - _FOUR_STEPS


@triton.jit
def _search(
    row,
    low,
    low_count,
    top_rank,
    goal,
    SLICE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PROBABILITY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The highest rank such that the tokens of at least this rank reach the goal, in number or in probability.

    The tokens of at least rank `low` reach it; there are `low_count` of them.
    """
    high = top_rank + 1
    high_count = low_count * 0
    while (low_count - high_count > 1) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        count, mass = _tally(row, middle, SLICE, AT_ONCE, PROBABILITY, INTERPRETED)
        if PROBABILITY:
            reached = mass.to(tl.float64) >= goal
        else:
            reached = count >= goal
        low = tl.where(reached, middle, low)
        low_count = tl.where(reached, count, low_count)
        high = tl.where(reached, high, middle)
        high_count = tl.where(reached, high_count, count)
    return low


@triton.jit
def _tally(
    row,
    from_rank,
    SLICE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PROBABILITY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """How many tokens have at least this rank, and the sum of their probabilities. Reads only slices with such tokens.

    `row` is (logits, sorted best ranks, best ranks of all slices as a tensor, largest logit, log2(e) / temperature,
    vocabulary's size).
    """
    logits_ptr, sorted_ptr, best_S, top, scale, vocab_size = row
    active = tl.sum((best_S >= from_rank).to(tl.int32), axis=0)
    count_AI = tl.zeros((AT_ONCE, SLICE), tl.int32)
    mass_AI = tl.zeros((AT_ONCE, SLICE), tl.int64)
    for first in range(0, bound(active, INTERPRETED), AT_ONCE):
        slices_A = first + tl.arange(0, AT_ONCE)
        best_A = tl.load(sorted_ptr + slices_A, mask=slices_A < active, other=NO_RANK)
        ids_AI = (token_of(best_A) // SLICE * SLICE)[:, None] + tl.arange(0, SLICE)[None, :]
        read_AI = (slices_A < active)[:, None] & (ids_AI < vocab_size)
        logits_AI = tl.load(logits_ptr + ids_AI, mask=read_AI, other=-float("inf"))
        counted_AI = read_AI & (rank_of(logits_AI, ids_AI) >= from_rank)
        count_AI += counted_AI.to(tl.int32)
        if PROBABILITY:
            probability_AI = tl.exp2((logits_AI - top) * scale) * _UNIT
            mass_AI += tl.where(counted_AI, probability_AI, 0.0).to(tl.int64)
    return tl.sum(tl.sum(count_AI, axis=1), axis=0), tl.sum(tl.sum(mass_AI, axis=1), axis=0)
