"""The demo models on this machine's GPU, through the whole engine. No asyncio plugin is needed."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineRequest
from baton.settings.node_config import NodeSettings


@dataclass(frozen=True)
class Output:
    token_ids: list[int]
    logprobs: list[float]


def build_demo(directory: Path, **options: Any) -> BuiltRunner:
    return build_runner(
        NodeSettings(model=directory, **{"device": "cuda", "num_blocks": 512, "max_batch_tokens": 256, **options})
    )


def generate(
    built: BuiltRunner,
    prompts: Sequence[Sequence[int]],
    params: ResolvedSampling,
    *,
    known: Sequence[Sequence[int]] = (),
    **limits: Any,
) -> list[Output]:
    """All prompts at once; outputs in their order.

    Args:
        known: tokens with which each output begins, and which are not in the returned one; none by default.
    """
    return asyncio.run(_generate(built, prompts, params, known or [()] * len(prompts), limits))


async def _generate(
    built: BuiltRunner,
    prompts: Sequence[Sequence[int]],
    params: ResolvedSampling,
    known: Sequence[Sequence[int]],
    limits: dict[str, Any],
) -> list[Output]:
    outputs = [Output([], []) for _ in prompts]
    left = set(range(len(prompts)))
    over = asyncio.Event()

    def on_step(events: StepEvents) -> None:
        assert events.failed == ()
        for sampled in events.tokens:
            index = int(sampled.request_id)
            outputs[index].token_ids.append(sampled.token.token_id)
            if sampled.token.logprob is not None:
                outputs[index].logprobs.append(sampled.token.logprob)
            if sampled.finish_reason is not None:
                assert sampled.finish_reason is FinishReason.LENGTH
                left.discard(index)
        if not left:
            over.set()

    # No more requests than prompts: every possible decode takes a token from the room of a chunk.
    allowed = {
        "max_batch_tokens": built.limits.max_batch_tokens,
        "max_batch_requests": min(built.limits.max_batch_requests, len(prompts)),
        "max_waiting": 256,
        "prefix_cache": True,
    }
    async with Engine(
        built.runner, EngineLimits(**{**allowed, **limits}), on_step=on_step, grammars=built.grammars
    ) as engine:
        for index, (prompt, output) in enumerate(zip(prompts, known, strict=True)):
            engine.submit(EngineRequest(str(index), tuple(prompt), params, output=tuple(output)))
        async with asyncio.timeout(120):
            await over.wait()
        load = engine.load()
        assert load.requests_running == load.requests_waiting == 0
    return outputs
