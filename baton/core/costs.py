"""Models the cost of engine steps: a few numbers, fitted to measured steps, predict the time of others. Pure.

Four places use the model: a node's scheduler sizes the slices of prompts by it, the gateway chooses where a prompt is
prefilled, `baton plan` simulates clusters with it, and it travels in every node's status.

    seconds = dense(tokens) + key_s * keys + pair_s * pairs + decode_row_s * decode rows
              + prompt_step_s, if there are prompts

`dense` is linear between measured points, because even a step of few tokens reads all weights. Steps with prompts have
a time of their own, because captured decode steps leave the host nothing to do.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Steps of few tokens cost the same, however few, so the lowest groups of token counts are wide.
_GROUPS = np.array([2, 8, 32, *(64 << power for power in range(16))])
_KNOT_RATIO = 1.3
# Where samples do not determine which cost explains them, tokens do first, then keys and pairs, then decode rows, then
# whether there are prompts.
_RIDGE_TOKENS, _RIDGE_ATTENTION, _RIDGE_ROWS, _RIDGE_PROMPTS = 1e-6, 1e-5, 1e-4, 1e-3
_ROUNDS = 4
_LEAST_SPREAD = 0.02
# Next to streams, smaller slices of prompts are not worth their step. After so many steps without a slice, a prompt
# gets one of this size whatever it costs, and of what more costs little: a step with prompts may take long however few
# tokens they have, because it reads the weights of all experts or is not captured (`baton.engine.scheduling.slices`).
MIN_SLICE_TOKENS = 64
SKIPS_MAX = 3
FORCED_STRETCH = 1.25
# While prompts wait for too long, steps next to streams without a TPOT may be so many times as long as they should be.
RELAXED_MAX = 8.0
# Beyond the largest measured step, a token costs at least this share of the mean cost of the tokens before.
_FURTHER_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step.

    Args:
        decode_rows: rows that decode one token each.
        keys: keys that these rows read, the sum of their contexts.
        prompt_tokens: tokens of prompts.
        pairs: pairs of a prompt's token and a key that it sees, over all prompts of the step.
    """

    decode_rows: int = 0
    keys: int = 0
    prompt_tokens: int = 0
    pairs: int = 0

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens


def chunk_pairs(start: int, stop: int) -> int:
    """Query-key pairs of a prompt's tokens from `start` to `stop`; each token attends to itself and all before it."""
    return (start + stop + 1) * (stop - start) // 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The cost model of one node.

    Args:
        points: tokens and seconds of steps without attention; at least one. Tokens ascend, seconds never descend.
        key_s, pair_s, decode_row_s: seconds for each key that decodes read, for each pair of a prompt, and for each
            decode row in addition to its token.
        prompt_step_s: seconds for each step with prompts, in addition to its tokens.
    """

    points: tuple[tuple[int, float], ...]
    key_s: float = 0.0
    pair_s: float = 0.0
    decode_row_s: float = 0.0
    prompt_step_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """The predicted time of a step."""
        attention_s = self.key_s * work.keys + self.pair_s * work.pairs
        prompts_s = self.prompt_step_s if work.prompt_tokens else 0.0
        return self.dense_s(work.tokens) + attention_s + self.decode_row_s * work.decode_rows + prompts_s

    def dense_s(self, tokens: int) -> float:
        """The time of a step's tokens without attention. Below the first point it is that point's; beyond the last one
        it grows as between the last two."""
        points = self.points
        place = bisect_left(points, (tokens, 0.0))
        if place == 0:
            return points[0][1]
        if place == len(points):
            if place == 1:
                return points[0][1] * tokens / points[0][0]
            place -= 1
        (low, low_s), (high, high_s) = points[place - 1 : place + 1]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)

    def prompt_tokens_s(self, tokens: int) -> float:
        """The time of a step of so many tokens of prompts, without attention."""
        return self.dense_s(tokens) + self.prompt_step_s

    def prompt_s(self, start: int, stop: int, *, step_tokens: int) -> float:
        """The time to compute a prompt's tokens from `start` to `stop` alone, in steps of `step_tokens`."""
        tokens = max(0, stop - start)
        whole, rest = divmod(tokens, step_tokens)
        dense_s = whole * self.prompt_tokens_s(step_tokens) + (self.prompt_tokens_s(rest) if rest else 0.0)
        return dense_s + self.pair_s * chunk_pairs(start, stop)


def mixed(first: StepCosts, second: StepCosts, share: float) -> StepCosts:
    """Costs between two models: `share` of the first's seconds of every step, and the rest of the second's."""
    rest = 1.0 - share
    tokens = sorted({tokens for costs in (first, second) for tokens, _ in costs.points})
    return StepCosts(
        tuple((each, share * first.dense_s(each) + rest * second.dense_s(each)) for each in tokens),
        key_s=share * first.key_s + rest * second.key_s,
        pair_s=share * first.pair_s + rest * second.pair_s,
        decode_row_s=share * first.decode_row_s + rest * second.decode_row_s,
        prompt_step_s=share * first.prompt_step_s + rest * second.prompt_step_s,
    )


def fit(samples: Sequence[tuple[StepWork, float]]) -> StepCosts:
    """The model that comes closest to measured steps, each with its seconds, and ignores outliers.

    Raises:
        ValueError: there is no sample, or one that took no time.
    """
    if not samples or min(seconds for _, seconds in samples) <= 0.0:
        raise ValueError("step costs need at least one sample, and every sample a time above 0 s")
    table = np.array([(w.decode_rows, w.keys, w.prompt_tokens, w.pairs, seconds) for w, seconds in samples], float)
    return fit_table(table, np.ones(len(table)))


def fit_table(table: NDArray[np.float64], weights: NDArray[np.float64]) -> StepCosts:
    """Fits the model like `fit`, to samples in the rows of a table.

    Args:
        table: decode rows, keys, prompt tokens, pairs and seconds; at least one row, all seconds above 0.
        weights: the rows' weights.
    """
    rows, keys, prompt_tokens, pairs, seconds = table.T
    tokens = np.maximum(rows + prompt_tokens, 1.0)
    knots = _knots(tokens)
    terms = _terms(tokens, knots, keys, pairs, rows, (prompt_tokens > 0).astype(float))
    ridge = np.array([_RIDGE_TOKENS] * len(knots) + [_RIDGE_ATTENTION] * 2 + [_RIDGE_ROWS, _RIDGE_PROMPTS])
    # Errors are relative. In the first round they are relative to the measured times, so slow outliers weigh nothing;
    # then to the predicted ones, which are unbiased.
    scale, trust, coefficients = seconds, weights, np.ones(terms.shape[1])
    for _ in range(_ROUNDS):
        coefficients = _nonnegative(terms / scale[:, None], seconds / scale, trust, ridge, coefficients)
        scale = np.maximum(terms @ coefficients, seconds.min() * 1e-3)
        errors = np.abs(seconds / scale - 1.0)
        spread = max(_LEAST_SPREAD, float(np.median(errors)) * 1.5)
        trust = weights / (1.0 + (errors / (2.4 * spread)) ** 2)
    return _to_costs(knots, coefficients, least_s=float(seconds.min()) * 1e-2)


def _knots(tokens: NDArray[np.float64]) -> list[int]:
    """Token counts of the points: the smallest and the largest step, and one for each group of similar ones between."""
    distinct = np.unique(tokens).astype(int)
    groups = np.split(distinct, np.flatnonzero(np.diff(np.searchsorted(_GROUPS, distinct, "right"))) + 1)
    first, last = int(distinct[0]), int(distinct[-1])
    knots = [first]
    for middle in [int(group[len(group) // 2]) for group in groups]:
        if middle >= knots[-1] * _KNOT_RATIO and middle * _KNOT_RATIO <= last:
            knots.append(middle)
    return [*knots, last] if last > first else knots


def _terms(tokens: NDArray[np.float64], knots: Sequence[int], *others: NDArray[np.float64]) -> NDArray[np.float64]:
    """One column for each coefficient: the first point's seconds, the rise to each further point, then the others."""
    columns = [np.ones_like(tokens)]
    columns += [np.clip((tokens - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)]
    return np.stack([*columns, *others], axis=1)


def _nonnegative(
    terms: NDArray[np.float64],
    target: NDArray[np.float64],
    weights: NDArray[np.float64],
    ridge: NDArray[np.float64],
    start: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Solves weighted least squares with coefficients of at least 0: an active-set method that starts from the positive
    ones of `start`."""
    weighted = terms * weights[:, None]
    norms = np.sqrt(np.maximum((weighted * terms).sum(0), 1e-300))
    gram = weighted.T @ terms / np.outer(norms, norms) + np.diag(ridge)
    wanted = weighted.T @ target / norms
    free = ((norms > 1e-100) & (start > 0.0)).nonzero()[0]
    solution = np.zeros(len(ridge))
    for _ in range(2 * len(ridge)):
        solution[:] = 0.0
        solution[free] = np.linalg.solve(gram[np.ix_(free, free)], wanted[free])
        if (solution < 0.0).any():
            free = (solution > 0.0).nonzero()[0]
            continue
        missing = wanted - gram @ solution
        missing[free] = 0.0
        missing[norms <= 1e-100] = 0.0
        best = int(missing.argmax())
        if missing[best] <= 1e-9 * float(np.abs(wanted).max()):
            break
        free = np.sort(np.append(free, best))
    coefficients: NDArray[np.float64] = np.maximum(solution, 0.0) / norms
    return coefficients


def _to_costs(knots: Sequence[int], coefficients: NDArray[np.float64], *, least_s: float) -> StepCosts:
    first_s, *rises = coefficients[: len(knots)].tolist()
    points = [(knots[0], max(first_s, least_s))]
    for tokens, rise_s in zip(knots[1:], rises, strict=True):
        points.append((tokens, points[-1][1] + rise_s))
    tokens, seconds = points[-1]
    least_rise_s = _FURTHER_SHARE * seconds
    slope_s = rises[-1] / (tokens - knots[-2]) if rises else 0.0
    if slope_s * tokens < least_rise_s:
        points.append((2 * tokens, seconds + least_rise_s))
    return StepCosts(tuple(points), *coefficients[len(knots) :].tolist())
