"""Runs steps of a built engine as its loop does, two in flight, and times them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from torch.profiler import ProfilerActivity, profile

from baton.core.errors import BatonError
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow, RowResult
from baton.engine.build import BuiltRunner
from baton.engine.device.runner import ModelRunner
from baton.engine.request import EngineLimits, EngineRequest, IntArray, int_array
from baton.engine.sampling.row import SampleRow
from baton.engine.scheduling.scheduler import Scheduler

GREEDY = ResolvedSampling(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
_WARM_STEPS = 4
# Least duration of `decode_ms`, so that a disturbance of some milliseconds does not decide the result.
_MEASURED_S = 0.4
_MOST_STEPS = 200
# All steps of `host_cost`.
HOST_STEPS = 3 * 64
_PROFILED_STEPS = 10


@dataclass(frozen=True)
class HostCost:
    """The cost of one step: `cpu_ms` is the host's time for scheduling, inputs and results, in the least disturbed
    series of steps; `wall_ms` is the duration of the whole step."""

    cpu_ms: float
    wall_ms: float


def decode_ms(
    runner: ModelRunner,
    *,
    requests: int,
    context: int,
    steps: int = 24,
    params: Sequence[ResolvedSampling] | None = None,
    adapters: Sequence[int] | None = None,
) -> float:
    """Milliseconds of a decode step: the median over `steps` steps around the context, or over more if they are short.

    Requests take their blocks at random from the whole cache, so contexts that exceed the cache together can be
    measured; each request reads as much as if it had its own blocks.

    Args:
        params: how each request is sampled; None: greedily.
        adapters: the slot of each request's adapter; None: no request has one.
    """

    def measure(steps: int) -> float:
        first, steps = max(1, context - steps // 2), _WARM_STEPS + steps
        timed = decode_steps(runner, requests=requests, context=first, steps=steps, params=params, adapters=adapters)
        ends_s = [time.perf_counter() for _ in timed]
        return float(median(np.diff(ends_s[_WARM_STEPS:])))

    step_s = measure(steps)
    if (enough := int(_MEASURED_S / step_s)) > steps:
        step_s = measure(min(enough, _MOST_STEPS))
    return step_s * 1e3


def idle_share(runner: ModelRunner, *, requests: int, context: int) -> float:
    """The share of time in which the GPU runs no kernel during consecutive decode steps, from the profiler's records;
    NaN if it records none."""
    steps = decode_steps(runner, requests=requests, context=context, steps=2 * _WARM_STEPS + _PROFILED_STEPS)
    for _ in range(_WARM_STEPS):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(_PROFILED_STEPS):
            next(steps)
    for _ in steps:
        """All steps in flight end before the next measurement."""
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in record.events() if event.device_type.name == "CUDA"
    )
    if not spans:
        return math.nan
    busy, until = 0.0, float(spans[0][0])
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return float(1 - busy / (until - spans[0][0]))


def host_cost(
    built: BuiltRunner, *, requests: int, context: int, rows: int = 3, steps: int = HOST_STEPS // 3
) -> HostCost:
    """Runs steps with the real scheduler; every request has its own blocks.

    Args:
        rows: series of steps; the fastest one counts.
        steps: steps of a series. Requests should get the same number of new blocks in each series.
    """
    limits = EngineLimits(
        max_batch_tokens=max(requests, built.limits.max_batch_tokens),
        max_batch_requests=requests,
        max_waiting=requests,
        prefix_cache=False,
    )
    scheduler = Scheduler(limits, built.runner.facts)
    for index, token_id in enumerate(_tokens(built.runner, requests)):
        request = EngineRequest(f"bench-{index}", (1,) * context, GREEDY)
        scheduler.reservations.reserve(request, 0.0)
        scheduler.reservations.admit(request.request_id, TokenOutput(token_id, 0))
    in_flight = []
    cpu_s, ends_s = [], []
    for _ in range(_WARM_STEPS + rows * steps):
        before_s = time.thread_time()
        batch = scheduler.schedule(0.0)
        assert batch is not None
        in_flight.append(built.runner.launch(batch))
        if len(in_flight) == 2:
            tokens = in_flight.pop(0).wait()
            scheduler.complete(tokens, 0.0)
        ends_s.append(time.perf_counter())
        cpu_s.append(time.thread_time() - before_s)
    in_flight.pop().wait()
    least_s = min(sum(cpu_s[start : start + steps]) for start in range(_WARM_STEPS, len(cpu_s), steps))
    return HostCost(least_s / steps * 1e3, median(np.diff(ends_s[_WARM_STEPS:])) * 1e3)


def prefill_ms(runner: ModelRunner, *, lengths: list[int], chunk: int | None = None, rounds: int = 5) -> float:
    """Milliseconds until whole prompts are computed and their tokens are on the host; the median of `rounds`.

    Args:
        chunk: tokens of one step, for a single prompt; None: all prompts in one step.
    """
    assert chunk is None or len(lengths) == 1
    batches = [_prompts(runner, lengths)] if chunk is None else _chunks(runner, lengths[0], chunk)

    def run() -> None:
        launched = [runner.launch(batch) for batch in batches[:2]]
        for batch in batches[2:]:
            launched.pop(0).wait()
            launched.append(runner.launch(batch))
        for step in launched:
            step.wait()

    run()
    return median(_milliseconds(run) for _ in range(rounds))


def _milliseconds(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return (time.perf_counter() - start_s) * 1e3


def decode_steps(
    runner: ModelRunner,
    *,
    requests: int,
    context: int,
    steps: int,
    params: Sequence[ResolvedSampling] | None = None,
    adapters: Sequence[int] | None = None,
) -> Iterator[None]:
    """Yields when a step's tokens are on the host; the next step is already launched."""
    size = runner.facts.block_size
    num_blocks = -(-(context + steps) // size)
    generator = np.random.default_rng(0)
    whole = [int_array(generator.integers(0, runner.facts.num_blocks, num_blocks).tolist()) for _ in range(requests)]
    # Different tokens, so that a mixture routes them to as many experts as real tokens.
    first = _tokens(runner, requests)
    tables: list[IntArray] = []
    in_flight = []
    for step in range(steps):
        position = context - 1 + step
        # As in the scheduler: a request's array stays the same until it gets another block.
        if step == 0 or position % size == 0:
            tables = [blocks[: position // size + 1] for blocks in whole]
        rows = tuple(
            BatchRow(
                f"bench-{index}",
                int_array([first[index] if step == 0 else 0]),
                position,
                blocks,
                _sample(step, GREEDY if params is None else params[index]),
                token_source=None if step == 0 else index,
                adapter=-1 if adapters is None else adapters[index],
                state_slot=_state_slot(runner, index),
            )
            for index, blocks in enumerate(tables)
        )
        in_flight.append(runner.launch(Batch(step + 1, rows)))
        if len(in_flight) == 2:
            _check(in_flight.pop(0).wait())
            yield
    in_flight.pop().wait()
    yield


def _prompts(runner: ModelRunner, lengths: list[int]) -> Batch:
    size, first, rows = runner.facts.block_size, 0, []
    for index, length in enumerate(lengths):
        num_blocks = -(-length // size)
        blocks = int_array(list(range(first, first + num_blocks)))
        first += num_blocks
        tokens, slot = _tokens(runner, length), _state_slot(runner, index)
        rows.append(BatchRow(f"bench-{index}", tokens, 0, blocks, _sample(0), state_slot=slot))
    return Batch(1, tuple(rows))


def _chunks(runner: ModelRunner, length: int, chunk: int) -> list[Batch]:
    blocks = int_array(list(range(-(-length // runner.facts.block_size))))
    batches: list[Batch] = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        mine = blocks[: -(-stop // runner.facts.block_size)]
        sample = _sample(0) if stop == length else None
        tokens, slot = _tokens(runner, stop - start), _state_slot(runner, 0)
        row = BatchRow("bench", tokens, start, mine, sample, state_slot=slot)
        batches.append(Batch(len(batches) + 1, (row,)))
    return batches


def _state_slot(runner: ModelRunner, index: int) -> int:
    """The slot of a request's recurrent state; -1 if the model has none."""
    return index if runner.facts.state_slots else -1


def _tokens(runner: ModelRunner, count: int) -> IntArray:
    return int_array(np.random.default_rng(1).integers(0, runner.facts.vocab_size, count).tolist())


def _sample(output_index: int, params: ResolvedSampling = GREEDY) -> SampleRow:
    return SampleRow(params, output_index, (), int_array(), 0)


def _check(results: Sequence[RowResult]) -> None:
    """Raises what a row has failed with."""
    for result in results:
        if isinstance(result, BatonError):
            raise result
