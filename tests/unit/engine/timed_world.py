"""A scheduler with drafts over a simulated device: steps take what a test says, and outputs are known. No clock
runs."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple, TypeAlias

from baton.core.costs import StepCosts, StepWork
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow, LayerDrafts, RowResult
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts
from baton.engine.scheduling.costs import Costs
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.speculation.depth import speculative_work
from baton.engine.speculation.speculator import Speculator

# About what an H200 takes for a model of 8 billion parameters: `python -m bench drafts`.
COSTS = StepCosts(((1, 0.0044), (32, 0.0046), (128, 0.0055), (512, 0.012)), key_s=3.3e-8)
_PROMPT, _OUTPUT = 300, 192
_SEATS = 256
_STALL = 10.0


class Text(NamedTuple):
    """One request: its prompt, the tokens that it is answered, and its TPOT."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    tpot_s: float | None = None


Texts: TypeAlias = Callable[[Random], Text]


def edited(share: float) -> Texts:
    """Outputs that repeat their prompt, with this share of other tokens."""

    def text(chosen: Random) -> Text:
        prompt = tuple(chosen.randrange(1000) for _ in range(_PROMPT))
        return Text(prompt, tuple(chosen.randrange(1000) if chosen.random() < share else t for t in prompt[:_OUTPUT]))

    return text


def records(fixed: int, free: int) -> Texts:
    """Outputs in which `fixed` tokens of one form come after `free` others, again and again."""

    def text(chosen: Random) -> Text:
        form = [chosen.randrange(1000) for _ in range(fixed)]
        output = list[int]()
        while len(output) < _OUTPUT:
            output += [*form, *(chosen.randrange(1000) for _ in range(free))]
        return Text(tuple(chosen.randrange(1000) for _ in range(_PROMPT)), tuple(output[:_OUTPUT]))

    return text


def unlike(chosen: Random) -> Text:
    """Few tokens that repeat by chance, so that drafts are often wrong."""
    return Text(
        tuple(chosen.randrange(30) for _ in range(_PROMPT)), tuple(chosen.randrange(30) for _ in range(_OUTPUT))
    )


def novel(chosen: Random) -> Text:
    """No token comes twice, so nothing can be drafted."""
    tokens = chosen.sample(range(1000), _PROMPT + _OUTPUT)
    return Text(tuple(tokens[:_PROMPT]), tuple(tokens[_PROMPT:]))


@dataclass(frozen=True)
class Device:
    """What steps really take.

    Args:
        costs: of plain steps.
        draft: each draft token costs so many times what `costs` say.
        step_s: more for each step with drafts.
        after_s: more for each plain step after one with drafts.
        gap_s, gap_row_s: for how long the device waits for a step that was not prepared ahead, and more for each row.
        state_s: more for each row of a step with drafts, which copies states.
        pass_s: for each token that the model's own layer drafts for all requests.
        noise: relative, of each step.
        stall: share of steps that take ten times as long.
    """

    costs: StepCosts = COSTS
    draft: float = 1.0
    step_s: float = 0.0
    after_s: float = 0.0
    gap_s: float = 0.0008
    gap_row_s: float = 5e-6
    state_s: float = 0.0
    pass_s: float = 0.0008
    noise: float = 0.01
    stall: float = 0.0

    def step_time_s(self, plain: StepWork, drafted: StepWork) -> float:
        plain_s = self.costs.seconds(plain)
        if drafted == plain:
            return plain_s
        dearer_s = self.draft * (self.costs.seconds(drafted) - plain_s)
        return plain_s + dearer_s + self.step_s + self.state_s * drafted.decode_rows

    def gap_time_s(self, rows: int) -> float:
        return self.gap_s + self.gap_row_s * rows


@dataclass
class Ran:
    """What a run took, and what plain steps would have taken for its tokens."""

    seconds: float = 0.0
    plain_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def slowdown(self) -> float:
        """The time per token, in multiples of that without drafts."""
        return self.seconds / self.plain_s

    @property
    def gain(self) -> float:
        """By how much more tokens a second come than without drafts, as a share."""
        return 1.0 / self.slowdown - 1.0

    def since(self, before: "Ran") -> "Ran":
        return Ran(*(ours - theirs for ours, theirs in zip(vars(self).values(), vars(before).values(), strict=True)))


class TimedWorld:
    """Decodes as many requests as there are in a batch at all times: another one follows each that ends.

    Args:
        layer: chance that a draft token of the model's own layer is right; None: it has none.
        state_slots: as in `ModelFacts`.

    Attributes:
        ended: the texts of requests that have ended, each with the seconds that it took.
    """

    def __init__(
        self,
        speculator: Speculator | None,
        meter: Costs,
        device: Device,
        *,
        seed: int = 0,
        layer: float | None = None,
        state_slots: int = 0,
    ) -> None:
        limits = EngineLimits(max_batch_tokens=4096, max_batch_requests=_SEATS, max_waiting=999, prefix_cache=False)
        facts = ModelFacts(
            20_000, 16, 2000, 1000, (1999,), "m", drafts=layer is not None, state_slots=state_slots, scan_tokens=16
        )
        self.scheduler = Scheduler(limits, facts, meter, speculator=speculator)
        self.device = device
        self.ran = Ran()
        self._layer = layer
        self._random, self._texts_random = Random(seed), Random(seed + 1)
        self._numbers: Iterator[int] = count()
        self._live: dict[str, Text] = {}
        self._begun_s: dict[str, float] = {}
        self.ended: list[tuple[Text, float]] = []
        self._in_flight: deque[tuple[Batch, float]] = deque()  # and when it was launched
        self._now = self._ended_s = 0.0
        self._was_drafted = False
        self._is_idle = True

    def run(self, texts: Texts, batch: int, steps: int) -> Ran:
        """Runs so many steps with such requests. Earlier requests continue."""
        before = Ran(**vars(self.ran))
        for _ in range(steps):
            while len(self._live) < batch:
                self._admit(texts)
            while self._launch():
                pass
            self._end_step()
        self.ran.seconds = self._now
        return self.ran.since(before)

    def _admit(self, texts: Texts) -> None:
        name, text = str(next(self._numbers)), texts(self._texts_random)
        sampling = ResolvedSampling(max_tokens=len(text.output), temperature=0.0, ignore_eos=True)
        self.scheduler.reservations.reserve(EngineRequest(name, text.prompt, sampling, tpot_s=text.tpot_s), self._now)
        self.scheduler.reservations.admit(name, TokenOutput(text.output[0], 0))
        self._live[name], self._begun_s[name] = text, self._now

    def _launch(self) -> bool:
        ahead = bool(self._in_flight)
        batch = self.scheduler.schedule(self._now)
        if batch is None:
            return False
        rows = len(batch.rows) + sum(row.num_drafts for row in batch.rows)
        gap_s = 0.0 if ahead else self.device.gap_time_s(rows)
        if self._is_idle:  # no step could be prepared ahead, with drafts or without
            self.ran.plain_s += gap_s
            self._is_idle = False
        self._in_flight.append((batch, self._now + gap_s))
        return True

    def _end_step(self) -> None:
        batch, launched_s = self._in_flight.popleft()
        plain = StepWork(len(batch.rows), sum(row.token_start + 1 for row in batch.rows))
        drafts = [(row.token_start, row.num_drafts) for row in batch.rows if row.num_drafts]
        seconds = self.device.step_time_s(plain, speculative_work(plain, drafts))
        if self._was_drafted and not drafts:
            seconds += self.device.after_s
        disturbed = self._random.gauss(1.0, self.device.noise)
        if self._random.random() < self.device.stall:
            disturbed *= _STALL
        seconds *= disturbed
        results = [self._result(row) for row in batch.rows]
        drafted = self._drafted(batch, results)
        ended_s = max(self._ended_s, launched_s) + seconds + (drafted.seconds if drafted else 0.0)
        waited_s = ended_s - self._ended_s - seconds if self.ran.steps else None
        self._now = self._ended_s = ended_s
        self._was_drafted = bool(drafts)
        events = self.scheduler.complete(results, seconds, layer_drafts=drafted, waited_s=waited_s)
        self.ran.steps += 1
        self.ran.drafted_steps += bool(drafts)
        self.ran.tokens += len(events.tokens)
        share = len(events.tokens) / plain.decode_rows
        self.ran.plain_s += share * self.device.costs.seconds(plain) * disturbed
        self.ran.drafted += sum(each.drafted for each in events.drafts)
        self.ran.accepted += sum(each.accepted for each in events.drafts)
        for each in events.tokens:
            if each.finish_reason is not None:
                self.ended.append((self._live.pop(each.request_id), ended_s - self._begun_s.pop(each.request_id)))
        self._is_idle = not self._live

    def _result(self, row: BatchRow) -> RowResult:
        assert row.sample is not None
        first = row.sample.output_index
        text = self._live.get(row.request_id)
        if text is None:  # a void row
            return TokenOutput(0, first)
        kept: list[TokenOutput] = []
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :] if row.num_drafts else ()
        for index, draft in enumerate((*drafts, None), start=first):
            kept.append(TokenOutput(text.output[index], index))
            if text.output[index] != draft:
                break
        return tuple(kept) if row.num_drafts else kept[0]

    def _drafted(self, batch: Batch, results: list[RowResult]) -> LayerDrafts | None:
        if not batch.num_layer_drafts:
            return None
        assert self._layer is not None
        tokens: dict[int, tuple[int, ...]] = {}
        for place, (row, result) in enumerate(zip(batch.rows, results, strict=True)):
            last = result[-1] if isinstance(result, tuple) else result
            text = self._live.get(row.request_id)
            if text is None or not isinstance(last, TokenOutput):
                continue
            right = text.output[last.index + 1 :][: batch.num_layer_drafts]
            tokens[place] = tuple((t + (self._random.random() >= self._layer)) % 1000 for t in right)
        return LayerDrafts(tokens, len(batch.rows), batch.num_layer_drafts * self.device.pass_s)
