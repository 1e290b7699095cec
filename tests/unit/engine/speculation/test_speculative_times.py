"""What a node learns from steps with drafts: how long the next ones take, and when drafts rest."""

from collections.abc import Callable
from random import Random

import pytest

from baton.core.costs import StepCosts, StepWork
from baton.engine.speculation.depth import speculative_work
from baton.engine.speculation.limits import assumed_wait_s
from baton.engine.speculation.speculative_times import EndedStep, SpeculativeTimes

COSTS = StepCosts(((1, 0.010), (64, 0.010), (512, 0.050)), key_s=1e-8)
CONTEXT = 1000


def plain_work(decodes: int = 8) -> StepWork:
    return StepWork(decodes, decodes * CONTEXT)


def speculate(times: SpeculativeTimes, drafts: int, wait_s: float, *, right: float = 1.0, decodes: int = 8) -> None:
    """Ends a step with drafts that takes `wait_s` longer than predicted."""
    plain = plain_work(decodes)
    work = speculative_work(plain, [(CONTEXT, drafts)])
    times.decided(decodes)
    tokens = decodes + round(right * drafts)
    times.ended(EndedStep(plain, work, tokens, COSTS.seconds(work), wait_s, late=True), COSTS)


def plain(times: SpeculativeTimes, count: int = 1, *, ratio: float = 1.0, late_s: float | None = None) -> None:
    """Ends steps without drafts; `late_s`: the wait of those that were prepared late."""
    work, late = plain_work(), late_s is not None
    for _ in range(count):
        times.ended(EndedStep(work, work, 8, ratio * COSTS.seconds(work), late_s or 0.0, late=late), COSTS)


def wait_s(times: SpeculativeTimes, drafts: int, *, decodes: int = 8) -> float:
    return times.wait_s(decodes, COSTS)(decodes + drafts)


def test_more_rows_are_expected_to_take_longer_before_anything_is_measured() -> None:
    times = SpeculativeTimes()
    assert wait_s(times, 1) == pytest.approx(assumed_wait_s(9))
    assert wait_s(times, 60) == pytest.approx(assumed_wait_s(68))
    assert times.lost_s(8, COSTS) == 0.0
    assert times.may_draft(8)


@pytest.mark.parametrize("steps", [12, 200])
@pytest.mark.parametrize(("step_s", "draft_s"), [(0.001, 1e-5), (0.004, 5e-5), (0.0, 2e-5), (0.003, 0.0), (0.0, 5e-4)])
def test_a_few_steps_replace_what_was_assumed(step_s: float, draft_s: float, steps: int) -> None:
    times = SpeculativeTimes()
    for step in range(steps):
        drafts = 1 + 7 * step % 60
        speculate(times, drafts, step_s + draft_s * drafts)
    for drafts in (5, 20, 60):
        assert wait_s(times, drafts) == pytest.approx(step_s + draft_s * drafts, rel=0.15, abs=6e-4)


def test_next_to_a_prompt_drafts_delay_others_by_as_many_plain_steps_of_decodes() -> None:
    plain = StepWork(8, 8 * CONTEXT, 504)
    work = speculative_work(plain, [(CONTEXT, 100)])
    late_s = COSTS.seconds(work) - COSTS.seconds(plain) + 0.002
    steps = SpeculativeTimes().ended(EndedStep(plain, work, 108, COSTS.seconds(work), 0.002, late=True), COSTS)
    assert steps == pytest.approx(1 + late_s / COSTS.seconds(plain_work()))


def test_one_size_of_dear_steps_lets_smaller_ones_be_tried() -> None:
    times = SpeculativeTimes()
    for _ in range(30):
        speculate(times, 40, 0.020)
    assert wait_s(times, 40) == pytest.approx(0.020, rel=0.05)
    assert wait_s(times, 4) < 0.006


def test_one_size_of_cheap_steps_makes_others_cheap() -> None:
    times = SpeculativeTimes()
    for _ in range(30):
        speculate(times, 40, 0.0005)
    for drafts in (1, 40):
        assert wait_s(times, drafts) == pytest.approx(0.0005, abs=2e-4)


def test_what_plain_steps_lose_after_drafts_counts_against_these() -> None:
    times = SpeculativeTimes()
    for _ in range(40):
        speculate(times, 4, 0.001)
        plain(times, late_s=0.002)
    assert times.lost_s(8, COSTS) == pytest.approx(0.002, rel=0.1)


def test_times_are_compared_with_what_plain_steps_really_take() -> None:
    """Where all steps take 1.2 times as long as predicted, drafts are no dearer for that."""
    times = SpeculativeTimes()
    plain(times, 200, ratio=1.2)
    for drafts in (1, 8, 16, 32) * 8:
        work = speculative_work(plain_work(), [(CONTEXT, drafts)])
        speculate(times, drafts, 0.2 * COSTS.seconds(work))
    for drafts in (1, 32):
        assert wait_s(times, drafts) == pytest.approx(0.0, abs=4e-4)


def test_a_cost_model_that_counts_too_much_for_each_draft_token_is_corrected() -> None:
    times = SpeculativeTimes()
    for drafts in (4, 16, 32) * 10:
        speculate(times, drafts, -1e-4 * drafts)
    for drafts in (1, 8, 32):
        assert wait_s(times, drafts) == pytest.approx(-1e-4 * drafts, abs=4e-4)


def test_how_long_prompts_take_is_no_matter_of_drafts() -> None:
    times = SpeculativeTimes()
    for drafts in (1, 16, 32) * 10:
        plain = StepWork(8, 8 * CONTEXT, 512, 512 * 512)
        work = speculative_work(plain, [(CONTEXT, drafts)])
        times.ended(EndedStep(plain, work, 8 + drafts, 5 * COSTS.seconds(work), 0.001, late=True), COSTS)
    assert wait_s(times, 16) == pytest.approx(0.001, abs=2e-4)
    times.ended(EndedStep(plain, plain, 8, 5 * COSTS.seconds(plain), 0.0), COSTS)
    assert wait_s(times, 16) == pytest.approx(0.001, abs=2e-4)


def test_costs_that_were_learned_since_do_not_count_twice() -> None:
    """The cost model may learn from the same steps why they took so long."""
    times = SpeculativeTimes()
    for drafts in (1, 16, 32) * 10:
        speculate(times, drafts, 0.004)
    dearer = StepCosts(tuple((tokens, seconds + 0.004) for tokens, seconds in COSTS.points), key_s=COSTS.key_s)
    assert times.wait_s(8, dearer)(16) == pytest.approx(0.0, abs=4e-4)


def test_a_batch_begins_with_what_is_known_of_another_one() -> None:
    times = SpeculativeTimes()
    for drafts in (1, 16, 32) * 10:
        speculate(times, drafts, 0.0005)
    assert wait_s(times, 10) < 0.001
    assert wait_s(times, 10, decodes=32) < 0.001
    dear = SpeculativeTimes()
    for drafts in (1, 16, 32) * 10:
        speculate(dear, drafts, 0.05)
    assert wait_s(dear, 10, decodes=32) == SpeculativeTimes().wait_s(32, COSTS)(42), "it is tried there too"


Lose = Callable[[SpeculativeTimes], None]


@pytest.mark.parametrize(
    ("lose", "lost_s"),
    [
        (lambda times: speculate(times, 4, 0.015, right=0.5), 0.0125),
        (lambda times: speculate(times, 16, 0.005, right=0.0), 0.005),
        (lambda times: plain(times, late_s=0.004), 0.004),
    ],
    ids=["dear drafts", "rejected drafts", "waits for nothing"],
)
def test_drafts_that_lose_rest_and_lose_a_bounded_share_of_the_time(lose: Lose, lost_s: float) -> None:
    times, chosen = SpeculativeTimes(), Random(1)
    plain_s = COSTS.seconds(plain_work())
    times.decided(8)
    losses = 0
    for _ in range(30_000):
        if times.may_draft(8) and chosen.random() < 0.3:
            lose(times)
            losses += 1
        else:
            plain(times)
    assert losses * lost_s < 0.005 * 30_000 * plain_s + 10 * plain_s
    assert losses > 5, "they are tried again and again"


def test_waits_for_nothing_make_the_next_wait_less_likely_until_there_are_drafts() -> None:
    times = SpeculativeTimes()
    times.decided(8)
    assert times.wasted_s(8) == 0.0
    speculate(times, 8, 0.001)
    plain(times, late_s=0.001)
    assert times.wasted_s(8) == 0.0, "drafts made this step late"
    for number in (1, 2, 3):
        plain(times, late_s=0.001)
        assert times.wasted_s(8) == pytest.approx(0.001 * number)
    speculate(times, 8, 0.001)
    assert 0.0 < times.wasted_s(8) < 0.001
    plain(times, 400)
    assert times.wasted_s(8) == 0.0


def test_late_plain_steps_show_how_long_the_device_waits_for_a_step() -> None:
    times = SpeculativeTimes()
    times.decided(8)
    plain(times, late_s=0.0004)
    assert wait_s(times, 1) == pytest.approx(0.0004, abs=1e-4)
    speculate(times, 100, 0.0104)
    assert wait_s(times, 10) == pytest.approx(0.0014, abs=1e-4)


def test_one_disturbed_step_does_not_end_drafts() -> None:
    times = SpeculativeTimes()
    for _ in range(20):
        speculate(times, 8, 0.001)
    speculate(times, 8, 30.0)
    assert times.may_draft(8)
    assert wait_s(times, 8) < 0.004


@pytest.mark.parametrize("seconds", [-0.1, 1e6, float("nan"), float("inf")])
def test_times_that_no_step_takes_are_ignored(seconds: float) -> None:
    times = SpeculativeTimes()
    speculate(times, 8, seconds)
    plain(times, late_s=seconds)
    assert wait_s(times, 8) == wait_s(SpeculativeTimes(), 8)
    assert times.may_draft(8)


def test_drafts_that_win_never_rest() -> None:
    times, chosen = SpeculativeTimes(), Random(2)
    for _ in range(2000):
        speculate(times, 8, 0.001, right=chosen.choice((0.0, 0.5, 1.0)))
        plain(times, late_s=0.001)
        assert times.may_draft(8)


def test_what_was_learned_is_forgotten_when_drafts_have_rested() -> None:
    times = SpeculativeTimes()
    for _ in range(20):
        speculate(times, 8, 0.05)
    assert not times.may_draft(8)
    dear_s = wait_s(times, 8)
    plain(times, 200)
    assert wait_s(times, 8) == pytest.approx(dear_s)
    plain(times, 10_000)
    assert times.may_draft(8)
    assert wait_s(times, 8) == SpeculativeTimes().wait_s(8, COSTS)(16)


def test_other_batches_do_not_rest() -> None:
    times = SpeculativeTimes()
    for _ in range(20):
        speculate(times, 8, 0.05)
    assert not times.may_draft(8)
    assert times.may_draft(1)
    assert times.may_draft(40)


def test_losses_count_for_the_batch_that_drafts_were_decided_for() -> None:
    """A request that ends or begins meanwhile makes it another size of batch."""
    times = SpeculativeTimes()
    for _ in range(20):
        times.decided(7)
        plain(times, late_s=0.005)
    assert not times.may_draft(7)
    assert times.may_draft(8)


def test_steps_that_end_sooner_than_predicted_are_learned_from() -> None:
    """Where no wait is known of one size of batch, and steps of the next one end sooner than predicted."""
    times = SpeculativeTimes()
    for decodes in (8, 40):
        for _ in range(20):
            speculate(times, 8, -0.005, decodes=decodes)
        assert wait_s(times, 8, decodes=decodes) <= 0.0


def test_costs_of_no_time_say_nothing() -> None:
    times, costs = SpeculativeTimes(), StepCosts(((1, 0.0), (64, 0.0)))
    work = speculative_work(plain_work(), [(CONTEXT, 3)])
    times.ended(EndedStep(plain_work(), work, 11, 0.01, 0.001, late=True), costs)
    assert times.may_draft(8)
