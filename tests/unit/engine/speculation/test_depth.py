"""How many draft tokens a step takes, by the cost model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import mul

import numpy as np
import pytest

from baton.core.costs import StepCosts, StepWork
from baton.engine.speculation.depth import Proposal, all_depths, choose_depths, could_pay, speculative_work
from baton.engine.speculation.limits import LEAST_GAIN
from baton.engine.speculation.wait_bounds import WaitBound, WaitBounds
from tests.unit.engine.speculation.request import COSTS

# Each token costs as much as any other.
SATURATED = StepCosts(((1, 0.001), (1000, 1.0)))


def proposal(*chances: float, context: int = 1000) -> Proposal:
    return Proposal(tuple(range(len(chances))), tuple(accumulate(chances, mul)), context)


def bounds(
    token_s: float, count: int, credits_s: Sequence[float] = (), *, others_s: float = inf, all_bear: bool = True
) -> WaitBounds:
    """So many requests wait as long for each token, and longer by their credits."""
    waits = [WaitBound(token_s, credit_s) for credit_s in credits_s or [0.0] * count]
    return WaitBounds(waits, others_s, all_bear)


@dataclass(frozen=True)
class HostWait:
    """A device's wait for a step with drafts."""

    step_s: float
    row_s: float

    def __call__(self, rows: int) -> float:
        return self.step_s + self.row_s * rows


def rate(proposals: list[Proposal], depths: list[int], work: StepWork, costs: StepCosts, wait_s: HostWait) -> float:
    """Expected tokens a second."""
    tokens = work.decode_rows + sum(sum(p.chances[:depth]) for p, depth in zip(proposals, depths, strict=True))
    drafts = [(p.context, depth) for p, depth in zip(proposals, depths, strict=True)]
    drafted = speculative_work(work, drafts)
    return tokens / (costs.seconds(drafted) + (wait_s(drafted.decode_rows) if any(depths) else 0.0))


@pytest.mark.parametrize("costs", [COSTS, SATURATED], ids=["weights", "saturated"])
def test_a_choice_is_never_worse_than_the_plain_step(costs: StepCosts) -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        proposals = [
            proposal(*generator.random(int(generator.integers(0, 17))), context=int(generator.integers(1, 50_000)))
            for _ in range(int(generator.integers(1, 40)))
        ]
        work = StepWork(len(proposals) + 3, sum(each.context + 1 for each in proposals))
        room, wait_s = int(generator.integers(0, 200)), HostWait(*generator.random(2) * (1e-3, 1e-5))
        depths = choose_depths(proposals, work, costs, room=room, wait_s=wait_s)
        assert all(0 <= depth <= len(each.tokens) for depth, each in zip(depths, proposals, strict=True))
        assert sum(depths) <= room
        plain = rate(proposals, [0] * len(proposals), work, costs, wait_s)
        chosen = rate(proposals, depths, work, costs, wait_s)
        assert not any(depths) or chosen > LEAST_GAIN * plain
        # No single depth for all requests is better by more than what the tried numbers leave out.
        for depth in range(17):
            same = [min(depth, len(each.tokens)) for each in proposals]
            if sum(same) <= room:
                assert max(chosen, LEAST_GAIN * plain) >= 0.97 * rate(proposals, same, work, costs, wait_s)


def test_likely_drafts_are_taken_where_weights_cost_most() -> None:
    assert choose_depths([proposal(*[0.9] * 8)], StepWork(1, 1000), COSTS, room=64) == [8]


def test_the_most_likely_drafts_get_the_room() -> None:
    proposals = [proposal(0.5, 0.9), proposal(0.9, 0.9), proposal(0.9, 0.3)]
    assert choose_depths(proposals, StepWork(3, 3000), COSTS, room=3) == [0, 2, 1]
    assert choose_depths(proposals, StepWork(3, 3000), COSTS, room=0) == [0, 0, 0]
    assert choose_depths(proposals, StepWork(3, 3000), COSTS, room=-1) == [0, 0, 0]


def test_nothing_is_drafted_at_saturation() -> None:
    proposals = [proposal(*[0.99] * 8)] * 64
    work = StepWork(64, 64_000)
    assert choose_depths(proposals, work, SATURATED, room=512) == [0] * 64
    assert not could_pay(work, SATURATED, most_each=16, wait_s=lambda _: 0.0)
    assert could_pay(work, COSTS, most_each=16, wait_s=lambda _: 0.0)


def test_nothing_is_drafted_where_costs_are_unknown_or_no_request_decodes() -> None:
    assert choose_depths([proposal(0.99)], StepWork(1, 1000), None, room=64) == [0]
    assert choose_depths([], StepWork(), COSTS, room=64) == []


def test_a_gain_that_the_host_takes_is_none() -> None:
    one = [proposal(0.2)]
    assert choose_depths(one, StepWork(1, 1000), COSTS, room=64) == [1]
    assert choose_depths(one, StepWork(1, 1000), COSTS, room=64, wait_s=lambda _: 0.002) == [0]


def test_drafts_delay_no_token_of_another_request_beyond_its_bound() -> None:
    """A plain step takes 10 ms, and one with 500 more rows about 50 ms."""
    likely, nothing, work = proposal(*[0.99] * 16), proposal(), StepWork(40, 40_000)
    all_likely, one_has_none = [likely] * 40, [likely] * 39 + [nothing]

    def step_s(proposals: list[Proposal], depths: list[int]) -> float:
        return COSTS.seconds(speculative_work(work, [(p.context, n) for p, n in zip(proposals, depths, strict=True)]))

    free = choose_depths(one_has_none, work, COSTS, room=900)
    bound = choose_depths(one_has_none, work, COSTS, room=900, bounds=bounds(0.015, 40))
    assert step_s(one_has_none, free) > 0.015 >= step_s(one_has_none, bound)
    assert 0 < sum(bound) < sum(free)
    short = bounds(0.009, 40)
    assert choose_depths([likely] * 40, work, COSTS, room=900, bounds=short) != [0] * 40, "all get more of the step"
    assert choose_depths(one_has_none, work, COSTS, room=900, bounds=short) == [0] * 40
    others = bounds(0.009, 39, others_s=0.009)
    assert choose_depths(all_likely[:39], work, COSTS, room=900, bounds=others) == [0] * 39, "another one decodes too"


def test_what_plain_steps_lose_counts_against_the_gain_but_makes_the_step_no_longer() -> None:
    likely, work = proposal(*[0.9] * 8), StepWork(1, 1000)
    plain_s = COSTS.seconds(work)
    assert choose_depths([likely], work, COSTS, room=8, lost_s=plain_s, bounds=bounds(1.1 * plain_s, 1)) == [8]
    assert choose_depths([likely], work, COSTS, room=8, lost_s=9 * plain_s) == [0]


def test_no_long_step_is_chosen_where_a_request_may_get_one_token_of_it() -> None:
    likely, work = [proposal(*[0.99] * 16)] * 40, StepWork(40, 40_000)
    assert choose_depths(likely, work, COSTS, room=900, bounds=bounds(0.009, 40)) != [0] * 40
    assert choose_depths(likely, work, COSTS, room=900, bounds=bounds(0.009, 40, all_bear=False)) == [0] * 40


def test_requests_that_are_ahead_wait_longer_for_the_drafts_of_others() -> None:
    """A plain step takes 10 ms, and no draft token fits into 9."""
    likely, nothing, work = proposal(*[0.99] * 16), proposal(), StepWork(40, 40_000)

    def depths(proposals: list[Proposal], bounds: WaitBounds) -> list[int]:
        return choose_depths(proposals, work, COSTS, room=900, bounds=bounds)

    behind, ahead = [likely] * 39 + [nothing], [0.0] * 39 + [0.02]
    assert not any(depths(behind, bounds(0.009, 40)))
    found = depths(behind, bounds(0.009, 40, ahead))
    assert any(found)
    drafted = speculative_work(work, [(1000, count) for count in found])
    assert COSTS.seconds(drafted) <= 0.029
    without = [likely] * 39
    assert not any(depths(without, bounds(0.009, 39, others_s=0.009)))
    assert depths(without, bounds(0.009, 39, others_s=0.029)) == found[:39]
    assert any(depths([likely] * 40, bounds(0.009, 40, [0.02] * 40, all_bear=False)))
    assert not any(depths([likely] * 40, bounds(0.009, 40, ahead[::-1], all_bear=False)))


def test_a_gain_that_errors_of_costs_could_explain_is_none() -> None:
    flat = StepCosts(((1, 0.010), (64, 0.010)))
    assert choose_depths([proposal(LEAST_GAIN - 1.001)], StepWork(1, 1000), flat, room=64) == [0]
    assert choose_depths([proposal(LEAST_GAIN - 0.999)], StepWork(1, 1000), flat, room=64) == [1]


def test_a_long_context_makes_drafts_dearer() -> None:
    costs = StepCosts(((1, 0.010), (64, 0.010)), key_s=1e-7)
    assert choose_depths([proposal(*[0.5] * 8, context=100)], StepWork(1, 101), costs, room=64) == [8]
    assert choose_depths([proposal(*[0.5] * 8, context=100_000)], StepWork(1, 100_001), costs, room=64) == [0]


def test_each_draft_token_of_a_step_is_a_row_that_reads_what_comes_before_it() -> None:
    work = speculative_work(StepWork(2, 300, 10, 50), [(99, 3), (199, 0)])
    assert work == StepWork(5, 300 + 101 + 102 + 103, 10, 50)


def test_all_drafts_are_taken_up_to_the_room() -> None:
    proposals = [proposal(0.5, 0.5), proposal(), proposal(0.9, 0.9, 0.01)]
    assert all_depths(proposals, room=64) == [2, 0, 3]
    assert all_depths(proposals, room=3) == [1, 0, 2]
    assert all_depths(proposals, room=0) == [0, 0, 0]
