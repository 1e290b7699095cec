"""A tiny random Llama on disk, engines on it, and transformers' greedy tokens to compare with."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from baton.core.errors import BatonError
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, PromptLogprob, TokenOutput
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.engine.events import ChunkComputed, RequestStarted, StepEvents
from baton.engine.pooling import Vector
from baton.engine.request import EngineRequest
from baton.settings.node_config import NodeSettings
from tests.unit.engine.limits import limits
from tests.unit.models.tiny import VOCAB_SIZE

BLOCK_SIZE = 4


def build(directory: Path, *, num_blocks: int = 64, block_size: int = BLOCK_SIZE) -> BuiltRunner:
    return build_runner(NodeSettings(model=directory, num_blocks=num_blocks, block_size=block_size, device="cpu"))


def greedy(max_tokens: int, *, ignore_eos: bool = True) -> ResolvedSampling:
    return ResolvedSampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)


def prompt_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())


def transformers_greedy(
    model: Any, prompt: Sequence[int], max_tokens: int, *, min_tokens: int = 0, eos_token_id: int = VOCAB_SIZE
) -> list[int]:
    """By default no token of the vocabulary ends the sequence. Without an id transformers would use the model's own."""
    config = transformers.GenerationConfig(
        max_new_tokens=max_tokens, min_new_tokens=min_tokens, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0
    )
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


class EventRecorder:
    """Collects an engine's events, and lets a test wait for them."""

    def __init__(self) -> None:
        self.steps: list[StepEvents] = []
        self.tokens: dict[str, list[TokenOutput]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.errors: dict[str, BatonError] = {}
        self.started: dict[str, RequestStarted] = {}
        self.chunks: dict[str, list[ChunkComputed]] = {}
        self.scored: dict[str, tuple[PromptLogprob, ...]] = {}
        self.pooled: dict[str, Vector] = {}
        self._changed = asyncio.Event()

    def __call__(self, events: StepEvents) -> None:
        self.steps.append(events)
        for start in events.started:
            assert start.request_id not in self.started
            self.started[start.request_id] = start
        for chunk in events.chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
        for scored in events.scored:
            assert scored.request_id not in self.scored
            self.scored[scored.request_id] = scored.logprobs
        for pooled in events.pooled:
            assert pooled.request_id not in self.pooled
            self.pooled[pooled.request_id] = pooled.values
        for sampled in events.tokens:
            self.tokens.setdefault(sampled.request_id, []).append(sampled.token)
            if sampled.finish_reason is not None:
                assert sampled.request_id not in self.reasons
                self.reasons[sampled.request_id] = sampled.finish_reason
        for failed in events.failed:
            assert failed.request_id not in self.errors
            self.errors[failed.request_id] = failed.error
        self._changed.set()

    @property
    def draft_counts(self) -> tuple[int, int]:
        """Drafts of all steps: all that were computed, and those that were kept."""
        checked = [each for step in self.steps for each in step.drafts]
        return sum(each.drafted for each in checked), sum(each.accepted for each in checked)

    def ids(self, request_id: str) -> list[int]:
        return [token.token_id for token in self.tokens.get(request_id, [])]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def finished(self, *request_ids: str) -> None:
        await self.until(lambda: all(name in self.reasons or name in self.errors for name in request_ids))


@asynccontextmanager
async def running(
    built: BuiltRunner, *, meter: Any = None, **given: Any
) -> AsyncIterator[tuple[Engine, EventRecorder]]:
    """An engine that must have all blocks free when the test ends."""
    events = EventRecorder()
    async with Engine(built.runner, limits(**given), on_step=events, grammars=built.grammars, meter=meter) as engine:
        yield engine, events
        # A row scheduled before its request's end was known keeps the blocks for one more step.
        await events.until(lambda: engine.load().blocks_free == engine.load().blocks_total)
        load = engine.load()
        assert (load.blocks_free, load.requests_running, load.requests_waiting) == (load.blocks_total, 0, 0)


def request(
    name: str,
    prompt: tuple[int, ...],
    sampling: ResolvedSampling,
    *,
    output: tuple[int, ...] = (),
    prefill_only: bool = False,
) -> EngineRequest:
    return EngineRequest(name, prompt, sampling, output=output, prefill_only=prefill_only)
