"""How a node learns the costs of its steps while it serves."""

import math
import random

import pytest

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.engine.step_meter import StepMeter
from tests.unit.baton.test_costs import COSTS, steps

CPU = StepCosts(((1, 0.002), (512, 0.05)), key_s=2e-8)


def decode(rows: int, context: int = 100) -> StepWork:
    return StepWork(rows, rows * context)


def prompt(tokens: int, start: int = 0) -> StepWork:
    return StepWork(prompt_tokens=tokens, pairs=chunk_pairs(start, start + tokens))


def worst(meter: StepMeter, truth: StepCosts, works: list[StepWork], *, factor: float = 1.0) -> float:
    assert meter.costs is not None
    return max(abs(meter.costs.seconds(work) / (factor * truth.seconds(work)) - 1) for work in works)


def test_nothing_is_known_before_the_first_steps() -> None:
    meter = StepMeter()
    assert meter.costs is None
    for _ in range(4):
        meter.observe(decode(1), 0.01)
    assert meter.costs is not None


def test_a_profile_counts_until_steps_are_served() -> None:
    meter = StepMeter(COSTS)
    assert meter.costs == COSTS


def test_some_tens_of_steps_teach_a_node_without_a_profile_what_its_steps_cost() -> None:
    meter = StepMeter()
    served = [prompt(40), *[decode(1)] * 10, prompt(200), *[decode(2)] * 10, prompt(100), *[decode(3)] * 10]
    for index, work in enumerate(served):
        compiles = 50.0 if index in (0, 1) else 1.0
        meter.observe(work, compiles * CPU.seconds(work))
    assert worst(meter, CPU, [decode(1), decode(4), prompt(100), prompt(256), prompt(400)]) < 0.35


def test_a_paused_process_and_compiled_kernels_change_no_costs() -> None:
    meter, rng = StepMeter(), random.Random(5)
    for work in steps(rng, 1500):
        disturbed = rng.uniform(5, 1000) if rng.random() < 0.05 else 1.0
        meter.observe(work, disturbed * rng.lognormvariate(0, 0.03) * COSTS.seconds(work))
    assert worst(meter, COSTS, steps(rng, 200)) < 0.2


def test_costs_follow_a_device_that_becomes_slower() -> None:
    meter, rng = StepMeter(COSTS), random.Random(6)
    for work in steps(rng, 500):
        meter.observe(work, COSTS.seconds(work))
    for work in steps(rng, 2000):
        meter.observe(work, 1.3 * COSTS.seconds(work))
    assert worst(meter, COSTS, steps(rng, 200), factor=1.3) < 0.1


def test_what_is_never_served_keeps_the_costs_of_the_profile() -> None:
    meter = StepMeter(COSTS)
    for rows in list(range(1, 64)) * 40:
        meter.observe(decode(rows, 500), COSTS.seconds(decode(rows, 500)))
    assert worst(meter, COSTS, [prompt(512), prompt(4096), prompt(1024, 8192), decode(256, 500)]) < 0.25


def test_thousands_of_decode_steps_do_not_drive_out_the_rare_prompt() -> None:
    meter = StepMeter()
    for tokens in (100, 300, 1000, 100, 300, 1000):
        meter.observe(prompt(tokens), COSTS.seconds(prompt(tokens)))
    for index in range(5000):
        work = decode(1 + index % 32, 200 + index)
        meter.observe(work, COSTS.seconds(work))
    assert worst(meter, COSTS, [prompt(300), prompt(1000)]) < 0.25


def test_equal_steps_give_equal_costs() -> None:
    meters = [StepMeter(COSTS), StepMeter(COSTS)]
    for meter in meters:
        rng = random.Random(7)
        for work in steps(rng, 600):
            meter.observe(work, rng.lognormvariate(0, 0.1) * COSTS.seconds(work))
    assert meters[0].costs == meters[1].costs


def test_many_kinds_of_steps_take_no_more_memory() -> None:
    meter, rng = StepMeter(), random.Random(8)
    for _ in range(3000):
        rows, tokens = int(2 ** rng.uniform(0, 10)), int(2 ** rng.uniform(0, 14))
        work = StepWork(rows, rows * rng.randint(1, 1 << 17), tokens, chunk_pairs(0, tokens) * rng.randint(1, 100))
        meter.observe(work, COSTS.seconds(work))
    assert len(meter._places) == len(set(meter._places.values())) == len(meter._counts)
    assert worst(meter, COSTS, [prompt(512), prompt(4096)]) < 0.3


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_no_step_can_take_is_ignored(seconds: float) -> None:
    meter = StepMeter()
    for _ in range(20):
        meter.observe(decode(1), seconds)
    assert meter.costs is None


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_some_tens_of_steps_unlearn_what_was_measured_on_a_machine_that_was_busy_or_idle_then(factor: float) -> None:
    meter, rng = StepMeter(), random.Random(7)
    for work in steps(rng, 3000):
        meter.observe(work, factor * COSTS.seconds(work))
    assert worst(meter, COSTS, steps(rng, 50), factor=factor) < 0.2
    for work in steps(rng, 60):
        meter.observe(work, COSTS.seconds(work))
    served = steps(random.Random(8), 20)
    assert meter.costs is not None
    errors = sorted(abs(meter.costs.seconds(work) / COSTS.seconds(work) - 1) for work in served)
    assert errors[len(errors) // 2] < 0.2


def test_single_steps_off_their_prediction_unlearn_nothing() -> None:
    meter, rng = StepMeter(), random.Random(9)
    for work in steps(rng, 600):
        meter.observe(work, COSTS.seconds(work))
    for index, work in enumerate(steps(rng, 400)):
        meter.observe(work, (20.0 if index % 3 == 0 else 1.0) * COSTS.seconds(work))
    assert worst(meter, COSTS, steps(rng, 50)) < 0.2
