"""Gaps between the tokens of streams that decode, before and while 50 long prompts arrive at once."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from bench.goodput.deployments import Deployment, colocated, disaggregated, this_machine
from bench.table import Row

_TIMEOUT_S = 300.0
_PROMPT_TOKENS = 128  # of a stream
_STREAM_TOKENS = 8192  # more than it has time for


@dataclass(frozen=True)
class Burst:
    """Sizes of a burst of long prompts.

    Args:
        streams: that decode all the time.
        before_s: how long they decode before the prompts arrive.
    """

    streams: int
    prompts: int
    prompt_tokens: int
    before_s: float


@dataclass
class _Seen:
    """When tokens of the streams came, and when the burst's first tokens did."""

    streams: list[list[float]]
    began_s: float = 0.0
    first_tokens_s: list[float] = field(default_factory=list)

    def gaps_ms(self, start_s: float, stop_s: float) -> list[float]:
        """Of all streams; the gaps that end within the times."""
        gaps = (pair for times in self.streams for pair in pairwise(times))
        return [1e3 * (after - before) for before, after in gaps if start_s < after <= stop_s]


def run(progress: Callable[[str], None]) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    burst = Burst(32, 50, 8192, 3.0) if on_gpu else Burst(2, 4, 256, 2.0)
    machine = this_machine()
    rows: list[Row] = []
    for start in (disaggregated, colocated):
        with start(machine, progress) as deployments:
            for deployment in deployments:
                progress(f"burst: {deployment.name}")
                seen = asyncio.run(_measure(deployment, burst))
                work = f"{burst.streams} streams, {burst.prompts} prompts of {burst.prompt_tokens}, {machine.model}"
                rows += _rows(seen, f"{work}, {deployment.name}")
    return rows


def _rows(seen: _Seen, work: str) -> Iterator[Row]:
    last_s = max(seen.first_tokens_s)
    before, during = seen.gaps_ms(0.0, seen.began_s), seen.gaps_ms(seen.began_s, last_s)
    for name, percent in (("p50", 50), ("p99", 99)):
        steady, pressed = float(np.percentile(before, percent)), float(np.percentile(during, percent))
        goal = 0.9 if percent == 99 else None
        yield Row(f"gap, {name}, during", work, pressed, "ms", "before", steady, goal, less_is_better=True)
    yield Row("gap, longest, during", work, max(during), "ms", "before", max(before), less_is_better=True)
    yield Row("until the last first token", work, last_s - seen.began_s, "s")


async def _measure(deployment: Deployment, burst: Burst) -> _Seen:
    async with AsyncClient(deployment.address) as client:
        await asyncio.gather(*(_ask(client, _PROMPT_TOKENS, 8, [], seed=seed) for seed in range(burst.streams)))
        seen = _Seen([[] for _ in range(burst.streams)])
        begun = time.perf_counter()
        streams = [
            asyncio.create_task(_ask(client, _PROMPT_TOKENS, _STREAM_TOKENS, times, seed=100 + place))
            for place, times in enumerate(seen.streams)
        ]
        try:
            await asyncio.sleep(burst.before_s)
            if not all(seen.streams):
                raise RuntimeError(f"not every stream had a token after {burst.before_s:g} s")
            # The first tokens of the streams are not steady yet.
            steady_s = begun + (time.perf_counter() - begun) / 2
            for times in seen.streams:
                times[:] = [time_s for time_s in times if time_s > steady_s]
            seen.began_s = time.perf_counter()
            prompts: list[list[float]] = [[] for _ in range(burst.prompts)]
            await asyncio.gather(
                *(_ask(client, burst.prompt_tokens, 1, times, seed=1000 + at) for at, times in enumerate(prompts))
            )
            seen.first_tokens_s = [times[0] for times in prompts]
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return seen


async def _ask(client: AsyncClient, prompt_tokens: int, output_tokens: int, times: list[float], *, seed: int) -> None:
    """Writes down when each token came."""
    prompt = [int(token) for token in np.random.default_rng(seed).integers(10, 2000, prompt_tokens)]
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    async for event in client.generate(prompt, params, timeout_s=_TIMEOUT_S):
        times += [time.perf_counter()] * len(event.tokens)
