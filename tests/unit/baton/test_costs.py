"""The model of step costs: what it predicts, and how it is fitted to measured steps."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.costs import StepCosts, StepWork, chunk_pairs, fit

COSTS = StepCosts(((1, 0.005), (256, 0.008), (8192, 0.19)), key_s=1.2e-8, pair_s=2e-10, decode_row_s=2e-6)

small_s = st.floats(0.0, 1.0)


@st.composite
def models(draw: st.DrawFn) -> StepCosts:
    """Steps that take a least time up to some number of tokens, and then time for each token."""
    flat = draw(st.integers(16, 512))
    least_s = draw(st.floats(1e-4, 0.05))
    token_s = least_s / flat * draw(st.floats(0.5, 1.0))
    flat_s, far = least_s * draw(st.floats(1.0, 1.2)), 8192 + flat
    points = ((1, least_s), (flat, flat_s), (far, flat_s + (far - flat) * token_s))
    attention_s = {name: draw(small_s) * 1e-4 * token_s for name in ("key_s", "pair_s")}
    return StepCosts(points, **attention_s, prompt_step_s=draw(st.sampled_from((0.0, 0.0, 0.5, 5.0))) * least_s)


def steps(rng: random.Random, count: int) -> list[StepWork]:
    """Steps of a served node: decodes, prompts with and without context, and both."""
    works = []
    for _ in range(count):
        rows, context = rng.randint(1, 256), rng.randint(100, 4000)
        start, tokens = rng.choice((0, 0, 1000, 8000)), int(2 ** rng.uniform(4, 12))
        decodes = rng.random() < 0.6
        prompts = rng.random() < 0.6 or not decodes
        works.append(
            StepWork(
                rows * decodes, rows * context * decodes, tokens * prompts, chunk_pairs(start, start + tokens) * prompts
            )
        )
    return works


def test_the_pairs_of_a_prompt_are_those_of_its_chunks() -> None:
    assert chunk_pairs(0, 3) == 1 + 2 + 3
    assert chunk_pairs(0, 100) == chunk_pairs(0, 37) + chunk_pairs(37, 100)


def test_a_prompt_costs_what_its_steps_cost() -> None:
    chunks = [(0, 512), (512, 1024), (1024, 1100)]
    steps_s = [COSTS.seconds(StepWork(0, 0, stop - start, chunk_pairs(start, stop))) for start, stop in chunks]
    assert COSTS.prompt_s(0, 1100, step_tokens=512) == pytest.approx(sum(steps_s))


def test_between_points_costs_are_linear_and_below_the_first_constant() -> None:
    assert COSTS.dense_s(0) == COSTS.dense_s(1) == 0.005
    assert COSTS.dense_s(256) == 0.008
    assert COSTS.dense_s(4224) == pytest.approx((0.008 + 0.19) / 2)
    assert COSTS.dense_s(8192 + 7936) == pytest.approx(0.19 + 0.182)


@settings(max_examples=25, deadline=None)
@given(model=models(), seed=st.integers(0, 1 << 30))
def test_a_fit_recovers_a_model_under_noise_and_outliers(model: StepCosts, seed: int) -> None:
    rng = random.Random(seed)
    samples = []
    for work in steps(rng, 250):
        slow = rng.uniform(2, 100) if rng.random() < 0.1 else 1.0
        samples.append((work, model.seconds(work) * rng.lognormvariate(0, 0.05) * slow))
    fitted = fit(samples)
    errors = sorted(abs(fitted.seconds(work) / model.seconds(work) - 1) for work in steps(rng, 200))
    assert errors[100] < 0.06
    assert errors[190] < 0.2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300),
            st.integers(0, 5000),
            st.integers(0, 5000),
            st.integers(0, 9000),
            st.floats(1e-5, 10.0),
        ).filter(lambda sample: sample[0] + sample[2] > 0),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_is_measured_more_work_never_costs_less(drawn: list[tuple[int, int, int, int, float]]) -> None:
    fitted = fit(
        [
            (StepWork(rows, rows * context, tokens, chunk_pairs(start, start + tokens)), seconds)
            for rows, context, tokens, start, seconds in drawn
        ]
    )
    assert min(fitted.key_s, fitted.pair_s, fitted.decode_row_s) >= 0.0
    assert fitted.points[0][1] > 0.0
    for (low, low_s), (high, high_s) in pairwise(fitted.points):
        assert low < high
        assert low_s <= high_s
    # Nothing is free: steps that are far larger than any that was seen take longer.
    most = fitted.points[-1][0]
    assert fitted.dense_s(100 * most) > 5 * fitted.dense_s(most)


@settings(max_examples=25, deadline=None)
@given(model=models(), seed=st.integers(0, 1 << 30))
def test_a_fit_to_steps_of_some_sizes_predicts_steps_twice_as_large(model: StepCosts, seed: int) -> None:
    works = steps(random.Random(seed), 100)
    fitted = fit([(work, model.seconds(work)) for work in works])
    most = max(work.tokens for work in works)
    assert fitted.dense_s(2 * most) == pytest.approx(model.dense_s(2 * most), rel=0.3)


def test_few_samples_are_enough_for_a_first_model() -> None:
    one = fit([(StepWork(decode_rows=4, keys=400), 0.01)])
    assert one.seconds(StepWork(decode_rows=4, keys=400)) == pytest.approx(0.01, rel=0.01)
    assert 0.01 < one.seconds(StepWork(prompt_tokens=64, pairs=chunk_pairs(0, 64))) < 0.16


@pytest.mark.parametrize("samples", [[], [(StepWork(1), 0.0)]])
def test_nothing_measured_is_refused(samples: list[tuple[StepWork, float]]) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit(samples)
