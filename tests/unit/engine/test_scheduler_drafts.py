"""Steps with guessed tokens: the same tokens as without, whatever is guessed, and no block is lost."""

from collections import deque
from collections.abc import Sequence
from random import Random

import pytest

from baton.core.costs import StepCosts, StepWork
from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, Grammar, TokenOutput
from baton.engine.batch import Batch
from baton.engine.events import DraftsChecked, StepEvents
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.depth import Draft
from baton.engine.speculation.speculator import Speculating, Speculator
from tests.unit.engine.hashed_model import HashedModel
from tests.unit.engine.scheduling import BLOCK_SIZE, Meter, finish, request

_TOKENS = 7
EOS = 6


class Told(Speculator):
    """Guesses what a test says: after a request's known tokens, the tokens that really follow, with errors."""

    def __init__(self, model: HashedModel, *, most: int = 5, wrong: float = 0.3, silent: float = 0.2) -> None:
        super().__init__(always=True)
        self.live: set[str] = set()
        self.ended: list[str] = []
        self.checked: list[tuple[str, int, int]] = []
        self._model = model
        self._most, self._wrong, self._silent = most, wrong, silent
        self._random = Random(3)

    def begin(self, request: Speculating, *, root: bytes, grammar: Grammar | None) -> None:
        assert request.request_id not in self.live
        assert root
        assert grammar is None
        self.live.add(request.request_id)

    def end(self, request: Speculating) -> None:
        self.live.discard(request.request_id)
        self.ended.append(request.request_id)

    def pays(self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None) -> bool:
        assert work.decode_rows == len(requests)
        return self._random.random() > self._silent

    def choose(
        self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None, *, room: int
    ) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for each in requests:
            assert each.request_id in self.live
            most = min(self._most, each.most_drafts, room)
            if most <= 0 or self._random.random() < self._silent:
                continue
            right = self._model.continued(each.tokens, most)
            draft = [(token + 1) % _TOKENS if self._random.random() < self._wrong else token for token in right]
            room -= most
            drafts[each.request_id] = tuple(draft)
        return drafts

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        self.checked.append((request_id, drafted, accepted))


class World:
    """A scheduler over a model of hashes, two steps in flight where it allows that."""

    def __init__(self, told: "Told | None", model: HashedModel, *, num_blocks: int = 40, requests: int = 6) -> None:
        limits = EngineLimits(max_batch_tokens=24, max_batch_requests=requests, max_waiting=99, prefix_cache=True)
        facts = ModelFacts(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=1000,
            max_context_tokens=100,
            eos_token_ids=(EOS,),
            identity="m",
        )
        self.scheduler = Scheduler(limits, facts, Meter(None), speculator=told)
        self.model = model
        self.sequences: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.events: list[StepEvents] = []
        self._batches: deque[Batch] = deque()

    def submit(self, one: EngineRequest) -> None:
        self.sequences[one.request_id] = list(one.prompt)
        self.scheduler.submit(one, 0.0)

    def launch(self) -> bool:
        batch = self.scheduler.schedule(0.0)
        if batch is None:
            return False
        if any(row.num_drafts for row in batch.rows):
            assert not self._batches, "a step with guesses needs the tokens of all steps before"
        assert not any(row.num_drafts for each in self._batches for row in each.rows)
        assert sum(max(1, row.num_drafts + 1) for row in batch.rows) <= 24
        self._batches.append(batch)
        return True

    def end_step(self) -> None:
        batch = self._batches.popleft()
        events = self.scheduler.complete(self.model.run(batch, self.sequences), 0.0)
        self.events.append(events)
        for sampled in events.tokens:
            assert sampled.token.index == len(self.sequences[sampled.request_id]) - self._prompt(sampled[0])
            self.sequences[sampled.request_id].append(sampled.token.token_id)
            if sampled.finish_reason is not None:
                self.ended[sampled.request_id] = sampled.finish_reason

    @property
    def in_flight(self) -> int:
        return len(self._batches)

    def _prompt(self, name: str) -> int:
        return int(name.partition("-")[2])

    def run_all(self) -> None:
        while self.launch() or self.in_flight:
            if self.in_flight == 2 or not self.launch():
                self.end_step()


def _request(number: int, chosen: Random, *, shared: Sequence[int]) -> EngineRequest:
    prompt = [*shared[: chosen.randrange(len(shared))], *(chosen.randrange(_TOKENS) for _ in range(1, 9))]
    most = chosen.randrange(1, 40)
    sampling = ResolvedSampling(
        max_tokens=most, temperature=0.0, min_tokens=chosen.randrange(min(4, most)), ignore_eos=number % 3 == 0
    )
    return request(f"r{number}-{len(prompt)}", prompt, sampling=sampling)


def _expected(model: HashedModel, one: EngineRequest) -> list[int]:
    """What decoding alone gives."""
    tokens = model.continued(one.prompt, one.sampling.max_tokens)
    if not one.sampling.ignore_eos:
        for count, token in enumerate(tokens, start=1):
            if token == EOS and count > one.sampling.min_tokens:
                return tokens[:count]
    return tokens


@pytest.mark.parametrize("seed", range(120))
def test_any_guesses_give_the_tokens_of_decoding(seed: int) -> None:
    chosen = Random(seed)
    model = HashedModel(BLOCK_SIZE, num_tokens=_TOKENS)
    silent = chosen.random() * 0.95
    told = Told(model, most=chosen.randrange(1, 9), wrong=0.1 + chosen.random() / 2, silent=silent)
    world = World(told, model, num_blocks=chosen.choice((14, 26, 60)))
    shared = [chosen.randrange(_TOKENS) for _ in range(12)]
    requests = [_request(number, chosen, shared=shared) for number in range(14)]
    waiting, aborted = deque(requests), set[str]()
    while waiting or world.in_flight or world.launch():
        if waiting and chosen.random() < 0.4:
            world.submit(waiting.popleft())
        if chosen.random() < 0.02 and (running := sorted(set(world.sequences) - set(world.ended) - aborted)):
            aborted.add(running[0])
            world.scheduler.abort(running[0])
        world.launch()
        if world.in_flight and chosen.random() < 0.7:
            world.end_step()
    world.run_all()
    for one in requests:
        output = world.sequences[one.request_id][len(one.prompt) :]
        expected = _expected(model, one)
        assert output == (expected[: len(output)] if one.request_id in aborted else expected)
    if silent < 0.5:
        assert sum(accepted for _, _, accepted in told.checked) > 0
        assert sum(drafted - accepted for _, drafted, accepted in told.checked) > 0
    assert not told.live
    assert sorted(told.ended) == sorted(one.request_id for one in requests)
    assert world.scheduler.leaked_blocks(lambda _: True) == 0
    assert world.scheduler.load().blocks_free == world.scheduler.load().blocks_total


def test_right_guesses_need_fewer_steps() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    steps = {}
    for guesses in (False, True):
        told = Told(model, most=4, wrong=0.0, silent=0.0) if guesses else None
        world = World(told, model)
        sampling = ResolvedSampling(max_tokens=41, temperature=0.0, ignore_eos=True)
        world.submit(request("a-3", [1, 2, 3], sampling=sampling))
        world.run_all()
        assert world.ended == {"a-3": FinishReason.LENGTH}
        steps[guesses] = len(world.events)
    assert steps[False] == 41
    assert steps[True] == 1 + 40 // 5


def test_a_step_tells_what_was_guessed_and_kept() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    told = Told(model, most=3, wrong=0.0, silent=0.0)
    world = World(told, model)
    sampling = ResolvedSampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    world.submit(request("a-2", [1, 2], sampling=sampling))
    world.run_all()
    assert [events.drafts for events in world.events] == [
        (),
        (DraftsChecked("a-2", 3, 3),),
        (DraftsChecked("a-2", 3, 3),),
    ]
    assert [len(events.tokens) for events in world.events] == [1, 4, 4]


def test_nothing_is_guessed_beyond_the_last_token() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    world = World(Told(model, most=8, wrong=0.0, silent=0.0), model)
    world.submit(request("a-2", [1, 2], sampling=ResolvedSampling(max_tokens=4, temperature=0.0, ignore_eos=True)))
    world.run_all()
    assert [events.drafts for events in world.events] == [(), (DraftsChecked("a-2", 2, 2),)]
    assert world.sequences["a-2"] == [1, 2, *model.continued([1, 2], 4)]


def test_a_row_with_guesses_that_fails_frees_its_blocks() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    told = Told(model, most=5, wrong=0.0, silent=0.0)
    world = World(told, model)
    world.submit(request("a-2", [1, 2]))
    world.launch()
    world.end_step()
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    assert batch.rows[0].num_drafts == 5
    events = world.scheduler.complete([InternalError("broken")], 0.0)
    assert [failed.request_id for failed in events.failed] == ["a-2"]
    assert not told.live
    assert world.scheduler.load().blocks_free == world.scheduler.load().blocks_total


def test_a_step_with_guesses_counts_each_guess_as_a_row_that_reads_its_context() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    told = Told(model, most=5, wrong=0.0, silent=0.0)
    limits = EngineLimits(max_batch_tokens=24, max_batch_requests=8, max_waiting=99, prefix_cache=True)
    facts = ModelFacts(40, BLOCK_SIZE, 1000, 100, (EOS,), "m")
    meter = Meter(StepCosts(((1, 0.01),)))
    scheduler = Scheduler(limits, facts, meter, speculator=told)
    scheduler.submit(request("a-2", [1, 2]), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    finish(scheduler, batch, model.continued([1, 2], 1)[0])
    batch = scheduler.schedule(0.0)
    assert batch is not None
    scheduler.complete([tuple(TokenOutput(token, 1 + n) for n, token in enumerate([5]))], 0.0)
    assert meter.observed[-1][0] == StepWork(decode_rows=6, keys=3 + 4 + 5 + 6 + 7 + 8)


def test_a_drop_of_a_tenants_kv_reaches_the_guesses() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    dropped: list[frozenset[bytes]] = []

    class Dropping(Told):
        def drop_roots(self, roots: frozenset[bytes]) -> None:
            dropped.append(roots)

    world = World(Dropping(model), model)
    roots = frozenset([world.scheduler.root("salt", None)])
    world.scheduler.drop_roots(roots)
    assert dropped == [roots]
