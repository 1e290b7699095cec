"""A scheduler whose steps have drafts, over a model on the host."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from baton.core.costs import StepWork
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, Grammar, TokenOutput
from baton.engine.batch import Batch, LayerDrafts, RowResult
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.depth import Draft
from baton.engine.speculation.speculating import Speculating
from baton.engine.speculation.speculator import Speculator
from tests.unit.engine.hashed_model import HashedModel
from tests.unit.engine.scheduling import BLOCK_SIZE, Meter, request

NUM_TOKENS = 7
EOS = 6


class Told(Speculator):
    """Drafts what a test says: after a request's known tokens, the tokens that really follow, with errors."""

    def __init__(self, model: HashedModel, *, most: int = 5, wrong: float = 0.3, silent: float = 0.2) -> None:
        super().__init__(always=True)
        self.live: set[str] = set()
        self.finished: list[str] = []
        self._model = model
        self._most, self._wrong, self._silent = most, wrong, silent
        self._random = Random(3)

    def begin(
        self, request: Speculating, *, root: bytes | None, grammar: Grammar | None, tpot_s: float | None = None
    ) -> None:
        assert request.request_id not in self.live
        assert root
        assert grammar is None
        assert tpot_s is None
        self.live.add(request.request_id)

    def end(self, request: Speculating) -> None:
        self.live.discard(request.request_id)
        self.finished.append(request.request_id)

    def pays(self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None) -> bool:
        assert work.decode_rows == len(requests)
        return self._random.random() > self._silent

    def choose(
        self,
        requests: Sequence[Speculating],
        work: StepWork,
        costs: StepTimes | None,
        *,
        room: int,
        prompts: bool = False,
    ) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for each in requests:
            assert each.request_id in self.live
            most = min(self._most, each.most_drafts, room)
            if most <= 0 or self._random.random() < self._silent:
                continue
            right = self._model.continued(each.tokens, most)
            draft = [(token + 1) % NUM_TOKENS if self._random.random() < self._wrong else token for token in right]
            room -= most
            drafts[each.request_id] = tuple(draft)
        return drafts


class World:
    """A scheduler over a model of hashes, two steps in flight where it allows that.

    Args:
        owners: pools of this many blocks each.
        layer_errors: share of rejected drafts of the model's own layer; None: it has none.
    """

    def __init__(
        self,
        told: Speculator | None,
        model: HashedModel,
        *,
        num_blocks: int = 40,
        requests: int = 6,
        owners: int = 1,
        state_slots: int = 0,
        layer_errors: float | None = None,
        meter: Meter | None = None,
    ) -> None:
        limits = EngineLimits(
            max_batch_tokens=24,
            max_batch_requests=requests,
            max_waiting=99,
            prefix_cache=True,
        )
        facts = ModelFacts(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=1000,
            max_context_tokens=100,
            eos_token_ids=(EOS,),
            identity="m",
            num_owners=owners,
            state_slots=state_slots,
            scan_tokens=4,
            drafts=layer_errors is not None,
        )
        self._layer_errors = layer_errors
        self._random = Random(11)
        self._seats = limits.seats
        self.state_slots = state_slots
        self.scheduler = Scheduler(limits, facts, meter or Meter(None), speculator=told)
        self.model = model
        self.sequences: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.events: list[StepEvents] = []
        self.batches: deque[Batch] = deque()
        self.drafted = self.accepted = 0

    def submit(self, one: EngineRequest) -> None:
        self.sequences[one.request_id] = list(one.prompt)
        self.scheduler.submit(one, 0.0)

    def launch(self) -> bool:
        batch = self.scheduler.schedule(0.0)
        if batch is None:
            return False
        if any(row.num_drafts for row in batch.rows):
            assert not self.batches, "a step with drafts needs the tokens of all steps before"
        assert not any(row.num_drafts for each in self.batches for row in each.rows)
        assert sum(len(row.token_ids) for row in batch.rows) <= 24
        assert sum(row.num_drafts + 1 for row in batch.rows) <= self._seats, "a row for each draft token"
        self.batches.append(batch)
        return True

    def end_step(self) -> None:
        batch = self.batches.popleft()
        results = self.model.run(batch, self.sequences)
        events = self.scheduler.complete(results, 0.0, layer_drafts=self._layer_drafts(batch, results))
        self.events.append(events)
        for checked in events.drafts:
            assert 0 <= checked.accepted <= checked.drafted
            self.drafted += checked.drafted
            self.accepted += checked.accepted
        for sampled in events.tokens:
            assert sampled.token.index == len(self.sequences[sampled.request_id]) - self._prompt(sampled[0])
            self.sequences[sampled.request_id].append(sampled.token.token_id)
            if sampled.finish_reason is not None:
                self.ended[sampled.request_id] = sampled.finish_reason

    def _layer_drafts(self, batch: Batch, results: Sequence[RowResult]) -> LayerDrafts | None:
        """What the model's own layer drafts after a step: the tokens that come, with errors."""
        if not batch.num_layer_drafts:
            return None
        assert self._layer_errors is not None
        tokens: dict[int, tuple[int, ...]] = {}
        for place, (row, result) in enumerate(zip(batch.rows, results, strict=True)):
            drawn = result if isinstance(result, tuple) else (result,)
            if not all(isinstance(token, TokenOutput) for token in drawn):
                continue
            known = [*self.sequences[row.request_id], *(token.token_id for token in drawn)]  # type: ignore[union-attr]
            right = self.model.continued(known, self._random.randrange(1, batch.num_layer_drafts + 1))
            wrong = [self._random.random() < self._layer_errors for _ in right]
            tokens[place] = tuple((token + each) % NUM_TOKENS for token, each in zip(right, wrong, strict=True))
        return LayerDrafts(tokens, len(tokens), 0.001)

    @property
    def in_flight(self) -> int:
        return len(self.batches)

    @property
    def state_slots_left(self) -> int:
        """State slots that requests could take."""
        return self.scheduler._blocks.states.slots.num_available

    def _prompt(self, name: str) -> int:
        return int(name.partition("-")[2])

    def run_all(self) -> None:
        while self.launch() or self.in_flight:
            if self.in_flight == 2 or not self.launch():
                self.end_step()


def run_in_any_order(
    world: World, requests: Sequence[EngineRequest], chosen: Random, *, disturb: Callable[[], object] | None = None
) -> set[str]:
    """Submits the requests while steps run, launches and ends steps as `chosen` draws, and returns when all have ended.

    Args:
        disturb: called now and then; None: a running request is aborted instead.

    Returns:
        The aborted requests.
    """
    waiting, aborted = deque(requests), set[str]()
    while waiting or world.in_flight or world.launch():
        if waiting and chosen.random() < 0.4:
            world.submit(waiting.popleft())
        if chosen.random() < 0.02:
            if disturb is not None:
                disturb()
            elif running := sorted(set(world.sequences) - set(world.ended) - aborted):
                aborted.add(running[0])
                world.scheduler.abort(running[0])
        world.launch()
        if world.in_flight and chosen.random() < 0.7:
            world.end_step()
    return aborted


def any_request(number: int, chosen: Random, *, shared: Sequence[int]) -> EngineRequest:
    prompt = [*shared[: chosen.randrange(len(shared))], *(chosen.randrange(NUM_TOKENS) for _ in range(1, 9))]
    most = chosen.randrange(1, 40)
    sampling = ResolvedSampling(
        max_tokens=most, temperature=0.0, min_tokens=chosen.randrange(min(4, most)), ignore_eos=number % 3 == 0
    )
    return request(f"r{number}-{len(prompt)}", prompt, sampling=sampling)


def expected_output(model: HashedModel, one: EngineRequest) -> list[int]:
    """What decoding alone gives."""
    tokens = model.continued(one.prompt, one.sampling.max_tokens)
    if not one.sampling.ignore_eos:
        for count, token in enumerate(tokens, start=1):
            if token == EOS and count > one.sampling.min_tokens:
                return tokens[:count]
    return tokens
