"""Drafts of the model's own layer: how many are asked for, which of them a step takes, and what is learned."""

from typing import NamedTuple

import pytest

from baton.core.costs import StepCosts, StepWork
from baton.engine.batch import LayerDrafts
from baton.engine.speculation.layer_drafting import MOST_LAYER_DRAFTS, RETRY_STEPS, LayerDrafting, PassTimes
from baton.engine.speculation.speculator import Speculator
from tests.unit.engine.speculation.request import COSTS, ROOT, DecodingRequest, work_of

TARGET = [*range(5000, 5400)]
SATURATED = StepCosts(((1, 0.001), (1000, 1.0)))
LIKELY = [[0.9, 0.8, 0.7, 0.6]]


def count(
    layer: LayerDrafting,
    chances: list[list[float]],
    costs: StepCosts | None = COSTS,
    *,
    room: int = 64,
    prompts: bool = False,
) -> int:
    work = StepWork(len(chances), 1000 * len(chances))
    return layer.count(chances, work, costs, room=room, wait_s=lambda _: 0.0005, prompts=prompts)


def took(rows: int, passes: int, seconds: float) -> LayerDrafts:
    return LayerDrafts(dict.fromkeys(range(rows), (1,) * passes), rows, seconds)


class Decoded(NamedTuple):
    steps: int
    drafted: int
    accepted: int


def decode(speculator: Speculator, *, right: int, costs: StepCosts | None = COSTS, pass_s: float = 0.001) -> Decoded:
    """Decodes a request whose layer always has so many accepted drafts."""
    request = DecodingRequest("r", [1, 2, 3], TARGET)
    speculator.begin(request, root=ROOT, grammar=None)
    steps = asked = drafted = accepted = 0
    while not request.is_done:
        if asked:
            at = len(request.tokens) - len(request.prompt)
            drafts = [*TARGET[at : at + right], *[7] * MOST_LAYER_DRAFTS][:asked]
            speculator.observe_layer(LayerDrafts({0: tuple(drafts)}, 1, pass_s * asked))
            speculator.take_layer_drafts(request, drafts)
        draft = speculator.choose([request], work_of([request]), costs, room=64).get("r", ())
        asked = speculator.count_layer_drafts([request], work_of([request]), costs, room=64)
        before = len(request.tokens)
        request.take(draft)
        drafted, accepted = drafted + len(draft), accepted + len(request.tokens) - before - 1
        steps += 1
    speculator.end(request)
    return Decoded(steps, drafted, accepted)


def test_as_many_are_asked_for_as_pay() -> None:
    assert count(LayerDrafting(always=False), LIKELY) == MOST_LAYER_DRAFTS
    with_costs = LayerDrafting(always=False)
    with_costs.observe(took(1, 1, 0.001))
    assert count(with_costs, [[0.9, 0.05, 0.01]]) == 1
    assert count(LayerDrafting(always=False), LIKELY, SATURATED) == 0
    assert count(LayerDrafting(always=False), LIKELY, None) == 0


def test_slow_passes_lower_the_number() -> None:
    layer = LayerDrafting(always=False)
    layer.observe(took(1, 2, 2 * 0.0055))
    assert 0 < count(layer, LIKELY) < MOST_LAYER_DRAFTS
    for _ in range(20):
        layer.observe(took(1, 2, 2 * 0.02))
    assert count(layer, LIKELY) == 0


def test_passes_after_steps_with_prompts_have_times_of_their_own() -> None:
    layer = LayerDrafting(always=False)
    layer.observe(took(1, 2, 2 * 0.02), prompts=True)
    assert count(layer, LIKELY) == MOST_LAYER_DRAFTS
    assert count(layer, LIKELY, prompts=True) == 0


def test_no_more_are_asked_for_than_there_is_room() -> None:
    assert count(LayerDrafting(always=True), LIKELY, room=2) == 2
    assert count(LayerDrafting(always=True), LIKELY, room=0) == 0
    assert count(LayerDrafting(always=True), [], room=5) == 0
    assert count(LayerDrafting(always=True), LIKELY, None) == MOST_LAYER_DRAFTS


def test_one_is_tried_again_after_many_steps_without() -> None:
    layer, unlikely = LayerDrafting(always=False), [[0.01]]
    asked = [count(layer, unlikely) for _ in range(200)]
    assert set(asked) == {0, 1}
    assert 0 < sum(asked) < 200 / 50
    saturated = [count(LayerDrafting(always=False), unlikely, SATURATED) for _ in range(200)]
    assert not any(saturated)


def test_times_of_passes_are_known_by_their_rows() -> None:
    times = PassTimes()
    assert times.seconds(4) == 0.0
    times.observe(4, 2, 0.004)
    assert times.seconds(5) == pytest.approx(0.002)
    assert times.seconds(100) == times.seconds(1) == pytest.approx(0.002), "the nearest known one"
    times.observe(64, 1, 0.005)
    assert times.seconds(100) == pytest.approx(0.005)
    assert times.seconds(2) == pytest.approx(0.002)
    for _ in range(100):
        times.observe(4, 1, 0.001)
    assert times.seconds(4) == pytest.approx(0.001, rel=0.01)


def test_one_slow_pass_says_little() -> None:
    """The first pass may have compiled kernels."""
    times = PassTimes()
    times.observe(1, 1, 0.4)
    times.observe(1, 2, 0.002)
    assert times.seconds(1) == pytest.approx(0.001)
    times.observe(1, 1, 0.3)
    times.observe(1, 1, 0.001)
    assert times.seconds(1) == pytest.approx(0.001)


def test_accepted_drafts_take_a_fraction_of_the_steps() -> None:
    decoded = decode(Speculator(), right=MOST_LAYER_DRAFTS)
    assert decoded.steps < len(TARGET) / 4
    assert decoded.accepted == decoded.drafted


def test_the_depth_follows_what_is_right() -> None:
    decoded = decode(Speculator(), right=1)
    assert len(TARGET) / 2 - 2 <= decoded.steps < len(TARGET) * 0.52
    assert decoded.drafted < 1.3 * decoded.accepted


def test_rejected_drafts_end() -> None:
    decoded = decode(Speculator(), right=0)
    assert decoded.steps == len(TARGET) - 1
    assert decoded.drafted < 60


def test_a_long_match_needs_no_layer() -> None:
    speculator, request = Speculator(), DecodingRequest("r", TARGET[:200], TARGET[:100])
    request.tokens.extend(TARGET[1:30])
    speculator.begin(request, root=ROOT, grammar=None)
    speculator.choose([request], work_of([request]), COSTS, room=64)
    assert speculator.count_layer_drafts([request], work_of([request]), COSTS, room=64) == 0


def test_the_drafts_that_bring_more_are_taken() -> None:
    speculator, request = Speculator(always=True), DecodingRequest("r", [1, 2, 3, 4, 1, 2], [3, 9, 9, 9, 9, 9, 9])
    speculator.begin(request, root=ROOT, grammar=None)
    matched = speculator.choose([request], work_of([request]), COSTS, room=2)["r"]
    assert matched == (4, 1)
    speculator.take_layer_drafts(request, (8, 8, 8, 8))
    assert speculator.choose([request], work_of([request]), COSTS, room=64)["r"][:2] in {(8, 8), (4, 1)}


def test_drafts_count_for_the_tokens_after_which_they_were_made() -> None:
    speculator, request = Speculator(always=True), DecodingRequest("r", [1, 2, 3], TARGET)
    speculator.begin(request, root=ROOT, grammar=None)
    speculator.take_layer_drafts(request, (11, 12))
    request.take(())
    assert speculator.choose([request], work_of([request]), COSTS, room=64) == {}


@pytest.mark.parametrize(
    ("tpot_s", "prompts_next", "count"),
    [(None, False, 4), (0.01733, False, 4), (0.013, False, 0), (None, True, 4), (0.01733, True, 2)],
)
def test_a_request_without_drafts_waits_no_longer_for_passes_and_drafts_than_it_bears(
    tpot_s: float | None, prompts_next: bool, count: int
) -> None:
    """A plain step takes 10 ms. The device waits 2.3 ms for one with drafts, and each pass takes 0.2 ms. The request
    bears 0.9 of its TPOT. Prompts that want to share the step leave drafts half of what is above 10 ms."""
    speculator, requests = Speculator(), [DecodingRequest(name, [1, 2, 3], TARGET) for name in ("layer", "plain")]
    for request, bound_s in zip(requests, (None, tpot_s), strict=True):
        speculator.begin(request, root=ROOT, grammar=None, tpot_s=bound_s)
    speculator.has_hole(requests[1])
    speculator.observe_layer(took(1, 1, 0.0002))
    work = work_of(requests)
    for _ in range(2 * RETRY_STEPS):
        assert speculator.count_layer_drafts(requests, work, COSTS, room=64, prompts_next=prompts_next) == count
    assert speculator.writes_layer_kv(requests), "drafts would pay, and the bound may go"


def test_a_request_that_has_not_begun_has_the_chances_of_all() -> None:
    speculator, request = Speculator(), DecodingRequest("r", [1, 2, 3], TARGET)
    assert speculator.count_layer_drafts([request], work_of([request]), COSTS, room=64) > 0
