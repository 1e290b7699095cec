"""A small scheduler, requests for it, and steps that draw what a test says."""

from collections.abc import Sequence
from typing import Any

from baton.core.costs import StepCosts, StepWork
from baton.core.sampling import ResolvedSampling
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import Batch
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 4
VOCAB_SIZE = 1000
EOS = 999


class Meter:
    """Step costs that do not change; keeps what was observed."""

    def __init__(self, costs: StepCosts | None) -> None:
        self.costs = costs
        self.observed: list[tuple[StepWork, float]] = []

    def observe(self, work: StepWork, seconds: float) -> None:
        self.observed.append((work, seconds))


def make(
    *,
    num_blocks: int = 32,
    tokens: int = 16,
    requests: int = 8,
    waiting: int = 8,
    prefix_cache: bool = True,
    window: int = 0,
    costs: StepCosts | None = None,
    stream_share: float = 1.0,
    owners: int = 1,
    state_slots: int = 0,
    scan_tokens: int = 64,
    context: int = 100,
    offloads: bool = False,
) -> Scheduler:
    limits = EngineLimits(
        max_batch_tokens=tokens,
        max_batch_requests=requests,
        max_waiting=waiting,
        prefix_cache=prefix_cache,
        stream_share=stream_share,
    )
    facts = ModelFacts(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_context_tokens=context,
        eos_token_ids=(EOS,),
        identity="m",
        window_tokens=window,
        state_slots=state_slots,
        scan_tokens=scan_tokens,
        num_owners=owners,
    )
    return Scheduler(limits, facts, Meter(costs), offloads=offloads)


def request(
    name: str,
    prompt: Sequence[int] | int,
    *,
    output: tuple[int, ...] = (),
    prefill_only: bool = False,
    sampling: ResolvedSampling | None = None,
    priority: int = 0,
    **slo: Any,
) -> EngineRequest:
    """`prompt` as a number means this many tokens; no other request begins with them.

    Args:
        slo: further fields of the request.
    """
    tokens = tuple([ord(name[0]) + 100] * prompt) if isinstance(prompt, int) else tuple(prompt)
    return EngineRequest(
        name,
        tokens,
        sampling or ResolvedSampling(max_tokens=50, temperature=0.0),
        output=output,
        prefill_only=prefill_only,
        priority=priority,
        **slo,
    )


def finish(scheduler: Scheduler, batch: Batch, token_id: int = 5) -> StepEvents:
    """Ends the oldest step in flight, which is `batch`; every row that samples draws `token_id`. The logprob of a
    prompt token is minus its position."""
    results = [TokenOutput(token_id, row.sample.output_index) if row.sample else None for row in batch.rows]
    scores = {
        place: [
            PromptLogprob(target, -float(batch.rows[place].token_start + 1 + number))
            for number, target in enumerate(score.targets)
        ]
        for place, score in batch.scores
    }
    return scheduler.complete(results, 0.0, scores)


def launch(scheduler: Scheduler) -> Batch:
    """Schedules a step, which must have rows."""
    batch = scheduler.schedule(0.0)
    assert batch is not None
    return batch


def step(scheduler: Scheduler, token_id: int = 5) -> tuple[dict[str, int], StepEvents]:
    """One whole step: tokens computed per request, and its events."""
    batch = launch(scheduler)
    return {row.request_id: len(row.token_ids) for row in batch.rows}, finish(scheduler, batch, token_id)
