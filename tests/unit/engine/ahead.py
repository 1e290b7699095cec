"""Requests of every kind of sampling, and their tokens when only one step is in flight at a time."""

from collections.abc import Iterator

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner
from baton.engine.request import EngineRequest
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import greedy, prompt_of, request


def varied_requests() -> Iterator[EngineRequest]:
    """Greedy and seeded requests with penalties, minimum lengths, logprobs, and stop tokens."""
    kinds = (
        greedy(11),
        greedy(11, ignore_eos=False),
        ResolvedSampling(max_tokens=13, seed=3, temperature=1.2, top_p=0.9, logprobs=2),
        ResolvedSampling(max_tokens=9, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, ignore_eos=True),
        ResolvedSampling(max_tokens=16, min_tokens=6, seed=8, temperature=2.0, stop_token_ids=tuple(range(3, 30))),
        ResolvedSampling(max_tokens=1, temperature=0.0),
    )
    for index, sampling in enumerate((*kinds, *kinds)):
        yield request(f"r{index}", prompt_of(1 + 4 * index, seed=index), sampling)


def one_step_at_a_time(built: BuiltRunner, requests: list[EngineRequest]) -> dict[str, list[TokenOutput]]:
    """The tokens of the requests by id, without an engine."""
    scheduler = Scheduler(limits(max_batch_tokens=24, prefix_cache=False), built.runner.facts)
    tokens: dict[str, list[TokenOutput]] = {one.request_id: [] for one in requests}
    for one in requests:
        scheduler.submit(one, 0.0)
    while (batch := scheduler.schedule(0.0)) is not None:
        assert all(row.token_source is None for row in batch.rows)
        for sampled in scheduler.complete(built.runner.run(batch), 0.0).tokens:
            tokens[sampled.request_id].append(sampled.token)
    return tokens
