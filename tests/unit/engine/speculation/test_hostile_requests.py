"""Requests that are made to let drafts cost the most: what they cost is bounded, in counts."""

from collections.abc import Callable

import pytest

from baton.core.costs import StepWork
from baton.engine.request import IntArray, int_array
from baton.engine.speculation import sequence_index
from baton.engine.speculation.allowance import Allowance
from baton.engine.speculation.depth import speculative_work
from baton.engine.speculation.sequence_index import PLACES_PER_STEP, LastTokens, SequenceIndex
from baton.engine.speculation.speculator import Speculator
from tests.unit.engine.speculation.request import COSTS, ROOT, DecodingRequest, decode, plenty, teach_waits, work_of

FILE = list(range(1000, 1200))
WAIT_S = 0.0005  # of the device for each step with drafts
# From a draft token, and whether a step has taken it, to the token that comes.
Answer = Callable[[int, bool], int]


def other_than(proposed: int) -> int:
    """Another token of the file, so that there is a match again soon."""
    return FILE[(proposed - FILE[0] + 77) % len(FILE)]


def always_wrong(proposed: int, was_taken: bool) -> int:
    return other_than(proposed)


def wrong_if_taken(proposed: int, was_taken: bool) -> int:
    """The worst: what no step has taken is right, so that drafts seem likely, and what a step takes is wrong."""
    return other_than(proposed) if was_taken else proposed


ANSWERS = pytest.mark.parametrize("answer", [always_wrong, wrong_if_taken])


def on_a_fast_host() -> Speculator:
    """Drafts are tried most often where waits are short."""
    speculator = Speculator()
    for decode_rows in (1, 2, 4, 8, 16, 32, 64):
        teach_waits(speculator, decode_rows, WAIT_S)
    return speculator


class Hostile:
    """Requests whose outputs depend on what is drafted, next to honest ones.

    Attributes:
        wrong: taken drafts that were wrong.
        plain_s, drafted_s: predicted time of all steps without drafts, and with those that were taken.
    """

    def __init__(self, speculator: Speculator, count: int, answer: Answer) -> None:
        self.requests = [
            DecodingRequest(f"hostile {number}", [*FILE, *FILE[:40]], [0] * 9999) for number in range(count)
        ]
        self.wrong = 0
        self.plain_s = self.drafted_s = 0.0
        self._speculator = speculator
        self._answer = answer
        for request in self.requests:
            request.tokens.pop()
            speculator.begin(request, root=ROOT, grammar=None)

    def step(self, *honest: DecodingRequest) -> None:
        everyone = [*self.requests, *honest]
        work = work_of(everyone)
        self._speculator.pays(everyone, work, COSTS)
        drafts = self._speculator.choose(everyone, work, COSTS, room=256 - len(everyone))
        taken = [(len(each.tokens) - 1, len(drafts.get(each.request_id, ()))) for each in everyone]
        self.plain_s += COSTS.seconds(work)
        self.drafted_s += COSTS.seconds(speculative_work(work, taken)) + bool(drafts) * WAIT_S
        for request in honest:
            request.take(drafts.get(request.request_id, ()))
        for request in self.requests:
            draft = drafts.get(request.request_id, ())
            self.wrong += len(draft)
            proposed = draft or self._speculator.proposer._drafts[request.request_id].propose(1).tokens or FILE[:1]
            request.tokens.append(self._answer(proposed[0], bool(draft)))


@ANSWERS
@pytest.mark.parametrize("count", [1, 32])
def test_outputs_unlike_their_drafts_take_few_rows_and_little_time(count: int, answer: Answer) -> None:
    hostile = Hostile(on_a_fast_host(), count, answer)
    steps = 400
    for _ in range(steps):
        hostile.step()
    assert hostile.wrong < steps * count
    assert hostile.drafted_s < 1.05 * hostile.plain_s


@ANSWERS
def test_an_honest_request_is_drafted_for_next_to_many_hostile_ones(answer: Answer) -> None:
    speculator = on_a_fast_host()
    hostile = Hostile(speculator, 15, answer)
    for number in range(4):
        text = range(5000 + 500 * number, 5200 + 500 * number)
        honest, steps = DecodingRequest(str(number), text, text[:100]), 0
        speculator.begin(honest, root=b"honest", grammar=None)
        while not honest.is_done:
            hostile.step(honest)
            steps += 1
        speculator.end(honest)
        assert steps <= 12


def indexed(speculator: Speculator) -> int:
    return sum(drafts._index.num_indexed for drafts in speculator.proposer._drafts.values())


def test_long_prompts_that_begin_at_once_are_indexed_in_pieces() -> None:
    speculator = Speculator(always=True)
    requests = [DecodingRequest(str(number), range(100_000), FILE) for number in range(8)]
    for request in requests:
        speculator.begin(request, root=ROOT, grammar=None)
    before, calls, done = 0, 0, 8 * 100_000
    while indexed(speculator) < done:
        speculator.choose(requests, StepWork(8, 8), None, room=64)
        assert 0 < indexed(speculator) - before <= PLACES_PER_STEP + 2 * len(requests)  # the first tokens have no place
        before, calls = indexed(speculator), calls + 1
        for request in requests:
            request.tokens.append(200_000 + calls)
    assert calls <= 2 * done / PLACES_PER_STEP
    # What is indexed already is used meanwhile.
    early, late = Speculator(always=True), DecodingRequest("late", [*range(100_000), 7], range(50, 90))
    late.tokens.extend(range(51, 60))
    early.begin(late, root=None, grammar=None)
    assert early.choose([late], StepWork(1, 1), None, room=4) == {"late": (60, 61, 62, 63)}


def test_runs_that_many_requests_would_sort_in_the_same_step_are_sorted_one_after_another() -> None:
    """All of them began together, so all have their 512 new tokens at the same time."""
    allowance = Allowance(PLACES_PER_STEP)
    indexes = [SequenceIndex(int_array(list(range(9000))), allowance) for _ in range(6)]
    for index in indexes:
        allowance.refill()
        index.extend(9000)
    sorts = []
    for step in range(700):
        allowance.refill()
        before = [index.num_new for index in indexes]
        for index in indexes:
            index.tokens.append(step)
            index.extend(len(index.tokens))
        sorts.append(sum(index.num_new < new for index, new in zip(indexes, before, strict=True)))
    assert max(sorts) == 2  # a run is of 9,500 places
    assert sum(sorts) == 6
    assert all(index.num_indexed == 9700 for index in indexes)


def test_outputs_of_many_tenants_are_indexed_in_pieces() -> None:
    speculator = Speculator(always=True)
    requests = [DecodingRequest(str(number), [1, 2, 3], FILE) for number in range(12)]
    for number, request in enumerate(requests):
        root = b"%d" % number
        speculator.proposer.recent.add(root, int_array([*range(20_000, 29_000), *FILE]))
        speculator.begin(request, root=root, grammar=None)
        request.tokens.extend(FILE[1:9])
    drafted = []
    for _ in range(8):
        drafted.append(len(speculator.choose(requests, StepWork(12, 12), None, room=999)))
        for request in requests:
            request.tokens.append(FILE[len(request.tokens) - 3])
    assert drafted[0] == 2  # of 9,200 tokens each
    assert drafted[-1] == 12


def candidates(index: SequenceIndex, tokens: IntArray, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many places a lookup compares."""
    seen: list[int] = []
    monkeypatch.setattr(index, "_best", lambda ends, last: seen.extend(ends))
    index.longest(LastTokens(tokens))
    monkeypatch.undo()
    return len(seen)


@pytest.mark.parametrize("piece", [1, 300, 9999])
def test_repeats_and_hash_collisions_are_compared_a_bounded_number_of_times(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = int_array([3] * 4000)
    index = SequenceIndex(tokens, plenty())
    for stop in range(0, 4000 + piece, piece):
        index.extend(min(stop, 3999))
    assert candidates(index, tokens, monkeypatch) <= 16
    for name, count in (("_FACTORS", 3), ("_FARTHER", 4), ("_LONG_FACTORS", 12)):  # all places have the same hash
        monkeypatch.setattr(sequence_index, name, (0,) * count)
    tokens = int_array(list(range(4000)))
    index = SequenceIndex(tokens, plenty())
    for stop in range(0, 4000 + piece, piece):
        index.extend(min(stop, 3999))
    assert index.longest(LastTokens(tokens)) is None
    assert candidates(index, tokens, monkeypatch) <= 16


def test_outputs_that_end_and_begin_all_the_time_leave_bounded_memory() -> None:
    speculator = Speculator()
    for number in range(300):
        decode(speculator, DecodingRequest(str(number), [number], range(40)), root=b"%d" % number, costs=None)
    assert len(speculator.proposer) == 0
    assert speculator.proposer.recent.num_tokens == 300 * 41
