"""Measures step costs as in service, back to back with two steps in flight, and chooses a step size by them.

Knows runners and batches, no scheduler: each step to measure is written down as its rows.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median
from typing import Protocol

import numpy as np

from baton.core.costs import StepCosts, StepWork, chunk_pairs, fit
from baton.engine.batch import Batch, BatchRow, RowResult
from baton.engine.request import ModelFacts, int_array
from baton.engine.sampling.row import GREEDY_ROW
from baton.engine.scheduling.steps import STEPS_MAX

# Sizes to choose from. Smaller steps keep decodes and other prompts waiting for less time.
STEP_TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Share of the best rate among the allowed step sizes that the chosen one must reach.
_GOOD_RATE = 0.95
# Where all steps take too long, they may take so many times as long as the shortest. Half of DeepSeek-V3 on four H200s,
# launched by the host, took 0.1 s for 1,024 tokens and 0.17 s for 4,096.
_LITTLE_LONGER = 1.6
# Tokens of a usual prompt, and the contexts of requests that decode.
_PROMPT_TOKENS = 1024
_SHORT_CONTEXT, _LONG_CONTEXT = 512, 4096
_RULE_CONTEXT = 1024
# Context of the step that shows what pairs cost.
_FAR_CONTEXT = 32768
# Steps of each kind after one that warms up; fewer of long ones, as (seconds from which a step is one, steps).
_STEPS = 6
_LONG_STEPS = ((0.15, 3), (0.03, 4))
# A step is not measured when the step of half its size took longer than this.
_LONG_STEP_S = 0.25
_BUDGET_S = 4.0


class TimedLaunch(Protocol):
    def wait(self) -> list[RowResult]: ...


@dataclass(frozen=True)
class StepRule:
    """The conditions by which a node's step size is chosen.

    Args:
        longest_s: a step of the chosen size takes at most this long, unless all take longer.
        decode_rows: requests that decode in the same step.
        streams: whether requests decode on the node.
    """

    longest_s: float
    decode_rows: int = 0
    streams: bool = False


# A short prompt waits at most for the step that runs and the one that is launched.
PREFILL_RULE = StepRule(longest_s=0.15)
# Streams get 20 tokens a second while prompts are computed next to them.
DECODE_RULE = StepRule(longest_s=0.05, decode_rows=32, streams=True)
# A prefill node that also decodes: most of its steps hold prompts only; the scheduler bounds those that hold streams.
BOTH_RULE = StepRule(longest_s=PREFILL_RULE.longest_s, streams=True)


def choose_step_tokens(costs: StepCosts, sizes: Sequence[int], rule: StepRule) -> int:
    """The smallest step whose prompt tokens per second come close to the best rate of the sizes that the rule allows.
    If all steps take too long, those are allowed that take little longer than the shortest one."""
    step_s = {size: costs.seconds(_served_step(size, rule)) for size in sizes}
    shortest_s = min(step_s.values())
    longest_s = rule.longest_s if shortest_s <= rule.longest_s else _LITTLE_LONGER * shortest_s
    allowed = [size for size in sizes if step_s[size] <= longest_s]
    rates = {size: (size - rule.decode_rows) / step_s[size] for size in allowed}
    good = _GOOD_RATE * max(rates.values())
    return min(size for size, rate in rates.items() if rate >= good)


def step_sizes(rule: StepRule, *, most_tokens: int, max_batch_requests: int) -> list[int]:
    """The sizes to choose from up to `most_tokens`. On a node that decodes, the smallest size still has room for some
    prompt tokens when every other request decodes."""
    least = max_batch_requests + min(STEP_TOKENS) if rule.streams else 0
    return [size for size in STEP_TOKENS if least <= size <= most_tokens] or [most_tokens]


def _served_step(size: int, rule: StepRule) -> StepWork:
    rows = min(rule.decode_rows, size - 1)
    prompt_tokens = size - rows
    whole, rest = divmod(prompt_tokens, _PROMPT_TOKENS)
    pairs = whole * chunk_pairs(0, _PROMPT_TOKENS) + chunk_pairs(0, rest)
    return StepWork(rows, rows * _RULE_CONTEXT, prompt_tokens, pairs)


@dataclass(frozen=True)
class ServedStep:
    """A step to measure.

    Args:
        decode_rows: rows of one token, each after `context` tokens.
        prompt_tokens: tokens in prompts of usual length, each after `prompt_context` tokens, if any.
    """

    decode_rows: int = 0
    context: int = 0
    prompt_tokens: int = 0
    prompt_context: int = 0

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens

    @property
    def prompts(self) -> list[int]:
        """The lengths of its prompts' chunks."""
        if not self.prompt_tokens:
            return []
        count = 1 if self.prompt_context else -(-self.prompt_tokens // _PROMPT_TOKENS)
        return [self.prompt_tokens // count + (index < self.prompt_tokens % count) for index in range(count)]

    @property
    def work(self) -> StepWork:
        start = self.prompt_context
        pairs = sum(chunk_pairs(start, start + length) for length in self.prompts)
        return StepWork(self.decode_rows, self.decode_rows * (self.context + 1), self.prompt_tokens, pairs)


def served_steps(facts: ModelFacts, *, most_tokens: int, most_requests: int) -> list[ServedStep]:
    """The steps to measure that fit, the most informative ones first, larger ones after smaller ones of their kind."""
    longest = min(facts.max_context_tokens, facts.num_blocks * facts.block_size) - _STEPS - 2
    short, long = min(_SHORT_CONTEXT, longest // 2), min(_LONG_CONTEXT, longest)
    some = min(32, most_requests)

    def prompt(tokens: int) -> ServedStep:
        return ServedStep(prompt_tokens=min(tokens, most_tokens))

    def mixed(tokens: int) -> ServedStep:
        return ServedStep(some, short, min(tokens, most_tokens) - some)

    far = min(_FAR_CONTEXT, longest // 2)
    steps = [
        # A mixture's steps take several times as long with 8 or 32 decodes as with one, whose experts are few.
        prompt(256),
        ServedStep(1, short),
        ServedStep(min(8, most_requests), short),
        ServedStep(some, short),
        ServedStep(most_requests, short),
        prompt(1024),
        ServedStep(min(128, most_requests), short),
        ServedStep(some, long),
        prompt(2048),
        mixed(256),
        ServedStep(prompt_tokens=min(1024, most_tokens, far), prompt_context=far),
        mixed(1024),
        prompt(64),
        prompt(512),
        ServedStep(min(256, most_requests), short),
        ServedStep(min(128, most_requests), long),
        prompt(4096),
        prompt(8192),
    ]
    return [step for step in dict.fromkeys(steps) if _fits(step, most_tokens, most_requests, longest)]


def _fits(step: ServedStep, most_tokens: int, most_requests: int, longest: int) -> bool:
    rows = step.decode_rows + len(step.prompts)
    length = step.prompt_context + max(step.prompts, default=0)
    return 0 < step.tokens <= most_tokens and rows <= most_requests and length <= longest and step.prompt_tokens >= 0


def measure_costs(
    launch: Callable[[Batch], TimedLaunch],
    facts: ModelFacts,
    steps: Sequence[ServedStep],
    *,
    agree: Callable[[int], int],
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = _BUDGET_S,
) -> StepCosts:
    """Launches steps as an engine does, and fits the model to their times, the host's part included. Overwrites KV of
    any block.

    Args:
        launch: launches a batch on a prepared runner.
        agree: the smallest of all ranks' values, so that all ranks measure the same steps.
        budget_s: when it is spent, the remaining steps are left out.
    """
    measured: list[tuple[StepWork, float]] = []
    rows = _Rows(facts)
    start_s, number = clock(), 0
    too_long = max(step.tokens for step in steps) + 1
    for step in steps:
        if step.tokens >= too_long:
            continue
        batches = rows.batches(step, first=number + 1, count=1 + _STEPS)
        number += 1 + _STEPS
        seconds = _seconds(launch, batches, agree, clock)
        measured.append((step.work, seconds))
        if agree(int(seconds < _LONG_STEP_S or not step.prompt_tokens)) == 0:
            too_long = min(too_long, 2 * step.tokens)
        if agree(int(clock() - start_s < budget_s)) == 0:
            break
    return fit(measured)


def _seconds(
    launch: Callable[[Batch], TimedLaunch],
    batches: Iterator[Batch],
    agree: Callable[[int], int],
    clock: Callable[[], float],
) -> float:
    """The median time from the end of one step to the end of the next. Where the host takes longer than the device, the
    last step's end comes with the one before, so there are more steps than two."""
    start_s = clock()
    launch(next(batches)).wait()  # warms up
    took_s = clock() - start_s
    count = agree(next((count for long_s, count in _LONG_STEPS if took_s >= long_s), _STEPS))
    batches = islice(batches, count)
    in_flight: deque[TimedLaunch] = deque()
    ends_s = [clock()]
    for batch in batches:
        in_flight.append(launch(batch))
        if len(in_flight) == STEPS_MAX:
            in_flight.popleft().wait()
            ends_s.append(clock())
    for launched in in_flight:
        launched.wait()
        ends_s.append(clock())
    # The first step found an idle device.
    return median(after - before for before, after in pairwise(ends_s[1:]))


class _Rows:
    """Makes batches. Rows have random tokens, which a mixture routes to as many experts as real ones, in blocks at
    random from the whole cache; rows share blocks only where the cache is too small."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._random = np.random.default_rng(0)
        self._blocks = self._random.permutation(facts.num_blocks)
        self._next_block = 0

    def batches(self, step: ServedStep, *, first: int, count: int) -> Iterator[Batch]:
        """Consecutive steps from number `first` on. As in an engine, decode rows advance by one token with each step
        and stay the same objects until they get another block."""
        size = self._facts.block_size
        # At the start of a block, so that no row gets another one soon.
        start = step.context - (step.context % size if step.context >= size else 0)
        decodes = [self._row(index, 1, start, further=count) for index in range(step.decode_rows)]
        prompts = [
            self._row(index, length, step.prompt_context) for index, length in enumerate(step.prompts, len(decodes))
        ]
        shared: tuple[BatchRow, ...] = ()
        for number in range(first, first + count):
            position = start + number - first
            if number == first or position % size == 0:
                rows = [
                    row._replace(token_start=position, block_ids=row.block_ids[: position // size + 1], since=number)
                    for row in decodes
                ]
                shared = (*rows, *prompts)
            # Nodes count the time of the layer that drafts apart from that of steps without prompts.
            yield Batch(number, shared, writes_draft_kv=bool(prompts))

    def _row(self, index: int, length: int, start: int, *, further: int = 0) -> BatchRow:
        tokens = self._random.integers(0, self._facts.vocab_size, length).tolist()
        num_blocks = -(-(start + length + further) // self._facts.block_size)
        places = np.arange(self._next_block, self._next_block + num_blocks) % len(self._blocks)
        self._next_block += num_blocks
        blocks = int_array(self._blocks[places].tolist())
        slot = index if index < self._facts.state_slots else -1  # a row without one computes nothing of its state
        owner = index % self._facts.num_owners
        return BatchRow("profile", int_array(tokens), start, blocks, GREEDY_ROW, state_slot=slot, owner=owner)
