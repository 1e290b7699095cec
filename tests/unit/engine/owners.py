"""Requests computed step by step by the ranks of a node with attention data parallelism, or by one process.

Every rank schedules by itself, in lockstep: schedulers are pure, so all of them make the same steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from baton.core.sampling import ResolvedSampling
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import Batch
from baton.engine.build import build_runner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.runner import ModelRunner
from baton.engine.request import EngineLimits, EngineRequest
from baton.engine.scheduling.scheduler import Scheduler
from baton.models.layers.parallel import SINGLE, TensorParallel
from baton.settings.node_config import NodeSettings

# A prompt, and fields of its ResolvedSampling, which themselves cannot be sent to another process.
Request: TypeAlias = tuple[tuple[int, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Scene:
    """Requests, and the limits under which they are computed.

    Attributes:
        second: requests that come when the first ones have ended.
        blocks: of each rank's pool.
        graphs: steps run padded, in the buffers of graphs.
        batch_invariant: logits have the same bits in any batch.
    """

    model: Path
    first: Sequence[Request]
    second: Sequence[Request] = ()
    blocks: int = 64
    block_size: int = 16
    batch_tokens: int = 256
    graphs: bool = False
    batch_invariant: bool = False


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        outputs: by request.
        owners: of each request, in the order in which it had them.
        foreign_blocks: blocks of this rank's cache that were written, without a row of this rank in them.
        unwritten_blocks: the other way round.
        launches: steps by how they were launched.
    """

    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[PromptLogprob, ...]] = field(default_factory=dict)
    owners: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    foreign_blocks: int = 0
    unwritten_blocks: int = 0
    preemptions: int = 0
    mixed_steps: int = 0
    idle_steps: int = 0
    launches: Mapping[str, int] = field(default_factory=dict)


def compute_as_owner(parallel: TensorParallel, scenes: Mapping[str, Scene]) -> dict[str, Outcome]:
    owned = replace(parallel, whole_experts=True, own_attention=True)
    return {name: _compute(scene, owned) for name, scene in scenes.items()}


def compute_alone(scenes: Mapping[str, Scene]) -> dict[str, Outcome]:
    return {name: _compute(scene, SINGLE) for name, scene in scenes.items()}


def _compute(scene: Scene, parallel: TensorParallel) -> Outcome:
    settings = NodeSettings(
        model=scene.model,
        num_blocks=scene.blocks,
        block_size=scene.block_size,
        max_batch_tokens=scene.batch_tokens,
        device="cpu",
        batch_invariant=scene.batch_invariant,
    )
    built = build_runner(settings, parallel=parallel)
    before = built.cache.by_block.clone()
    runner = built.runner
    if scene.graphs:
        sizes = GraphSettings(max_requests=16, max_context_tokens=256, max_tokens=scene.batch_tokens)
        runner = ModelRunner(
            runner.model, runner.backend, built.cache, runner.facts, graphs=sizes, grammars=built.grammars
        )
    runner.prepare()
    limits = EngineLimits(max_batch_tokens=scene.batch_tokens, max_batch_requests=16, max_waiting=64, prefix_cache=True)
    scheduler = Scheduler(limits, runner.facts)
    outcome, written = Outcome(), set[int]()
    for number, requests in enumerate((scene.first, scene.second)):
        for index, (prompt, how) in enumerate(requests):
            scheduler.submit(EngineRequest(f"{number}.{index}", prompt, ResolvedSampling(**how)), 0.0)
        while (batch := scheduler.schedule(0.0)) is not None:
            launched = runner.launch(batch)
            _note(batch, outcome, written, parallel, scene.block_size)
            events = scheduler.complete(launched.wait(), 0.0, launched.scores)
            for error in events.failed:
                raise error.error
            for started in events.started:
                outcome.cached[started.request_id] = started.cached_tokens
            for scored in events.scored:
                outcome.prompt_logprobs[scored.request_id] = scored.logprobs
            for sampled in events.tokens:
                outcome.outputs.setdefault(sampled.request_id, []).append(sampled.token)
    load = scheduler.load()
    assert load.blocks_free == load.blocks_total == scene.blocks * parallel.num_owners
    outcome.preemptions, outcome.launches = load.preemptions, runner.launches
    touched_B = (built.cache.by_block != before).any(dim=2).any(dim=0)
    touched = set(touched_B.nonzero().flatten().tolist())
    outcome.foreign_blocks, outcome.unwritten_blocks = len(touched - written), len(written - touched)
    return outcome


def _note(batch: Batch, outcome: Outcome, written: set[int], parallel: TensorParallel, block_size: int) -> None:
    lengths = [len(row.token_ids) for row in batch.rows]
    outcome.mixed_steps += min(lengths) == 1 < max(lengths)
    own = [row for row in batch.rows if parallel.num_owners == 1 or row.owner == parallel.rank]
    outcome.idle_steps += not own
    for row in batch.rows:
        owners = outcome.owners.setdefault(row.request_id, [])
        if not owners or owners[-1] != row.owner:
            owners.append(row.owner)
    for row in own:
        written.update(row.block_ids[row.token_start // block_size :])


def tokens_of(outcome: Outcome) -> dict[str, list[int]]:
    return {name: [token.token_id for token in tokens] for name, tokens in outcome.outputs.items()}


def logprobs_of(outcome: Outcome) -> torch.Tensor:
    found = [token.logprob for _, tokens in sorted(outcome.outputs.items()) for token in tokens]
    return torch.tensor([0.0 if each is None else each for each in found])
