"""GPU time of steps with prompts, compared with the time of the same steps as they are served."""

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from torch.profiler import ProfilerActivity, profile

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner
from baton.engine.request import EngineLimits, EngineRequest
from baton.engine.scheduling.scheduler import Scheduler
from bench.engine.steps import GREEDY
from bench.table import Row

ONE_TOKEN = ResolvedSampling(temperature=0.0, max_tokens=1, ignore_eos=True)
_WARM_STEPS = 6
_STEPS = 30
_PROFILED_STEPS = 8


@dataclass(frozen=True)
class Work:
    """The work of one step: `decodes` requests of `context` tokens, and a prompt of `prompt` tokens.

    Attributes:
        goal: wanted share of the GPU's own time.
    """

    decodes: int
    context: int
    prompt: int
    goal: float | None = None

    def __str__(self) -> str:
        decodes = f"{self.decodes} decodes of {self.context} tokens and " if self.decodes else ""
        return f"{decodes}{self.prompt} prompt tokens"


WORKS = (
    Work(32, 1024, 256, goal=1 / 1.3),
    Work(128, 1024, 64),
    Work(0, 0, 64),
    Work(0, 0, 256),
    Work(0, 0, 512),
    Work(0, 0, 1024),
    Work(0, 0, 2048),
    Work(0, 0, 4096),
)


def run(model: str, built: BuiltRunner, prefix: str = "") -> Iterator[Row]:
    """The rows of all works. All times first, because a profiler makes every later launch slower.

    Args:
        prefix: of the rows' names.
    """
    works = [work for work in WORKS if work.decodes + work.prompt <= built.limits.max_batch_tokens]
    served = {work: _served(built, work) for work in works}
    for work, (wall_ms, cpu_ms) in served.items():
        busy_ms, idle = _busy(built, work)
        name = f"{prefix}step with a prompt"
        yield Row(name, f"{model}, {work}", wall_ms, "ms", "GPU alone", busy_ms, goal=work.goal, less_is_better=True)
        yield Row(f"{name}, CPU time", f"{model}, {work}", cpu_ms, "ms")
        yield Row(f"{name}, GPU idle", f"{model}, {work}", idle * 100, "%")


def _served(built: BuiltRunner, work: Work) -> tuple[float, float]:
    """Milliseconds of a step, and of the host's CPU time for it."""
    steps = _steps(built, work)
    for _ in range(_WARM_STEPS):
        next(steps)
    ends_s, cpu_s = [time.perf_counter()], time.thread_time()
    for _ in range(_STEPS):
        next(steps)
        ends_s.append(time.perf_counter())
    spent_s = time.thread_time() - cpu_s
    steps.close()
    return float(median(np.diff(ends_s))) * 1e3, spent_s / _STEPS * 1e3


def _busy(built: BuiltRunner, work: Work) -> tuple[float, float]:
    """Milliseconds of a step in which the GPU runs a kernel, and the share of time in which it runs none, from the
    profiler's records; NaN if it records none."""
    steps = _steps(built, work)
    for _ in range(_WARM_STEPS):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(_PROFILED_STEPS):
            next(steps)
    steps.close()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in record.events() if event.device_type.name == "CUDA"
    )
    busy_us, until = 0.0, -math.inf
    for start, end in spans:
        busy_us += max(0.0, end - max(start, until))
        until = max(until, end)
    if not spans:
        return math.nan, math.nan
    return busy_us / _PROFILED_STEPS / 1e3, 1 - busy_us / (until - spans[0][0])


def _steps(built: BuiltRunner, work: Work) -> Generator[None, None, None]:
    """Yields when a step has ended and the next one is launched, by the real scheduler. Close it in the end."""
    facts = built.runner.facts
    limits = EngineLimits(
        max_batch_tokens=max(work.decodes + work.prompt, built.limits.max_batch_tokens),
        max_batch_requests=work.decodes + 4,
        max_waiting=8,
        prefix_cache=False,
    )
    scheduler = Scheduler(limits, facts)
    draw = np.random.default_rng(0)
    for index in range(work.decodes):
        decode = EngineRequest(
            f"decode-{index}", tuple(draw.integers(0, facts.vocab_size, work.context).tolist()), GREEDY
        )
        scheduler.reservations.reserve(decode, 0.0)
        scheduler.reservations.admit(decode.request_id, TokenOutput(index, 0))
    prompts = [tuple(draw.integers(0, facts.vocab_size, work.prompt).tolist()) for _ in range(4)]
    in_flight = []
    number = 0
    try:
        while True:
            scheduler.submit(EngineRequest(f"prompt-{number}", prompts[number % 4], ONE_TOKEN), 0.0)
            number += 1
            batch = scheduler.schedule(0.0)
            assert batch is not None
            assert sum(len(row.token_ids) for row in batch.shared_rows) == work.decodes + work.prompt
            in_flight.append(built.runner.launch(batch))
            if len(in_flight) == 2:
                scheduler.complete(in_flight.pop(0).wait(), 0.0)
                yield
    finally:
        for step in in_flight:
            step.wait()
