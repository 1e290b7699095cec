"""Batch-invariant mode with recurrent layers of every kind, on a CPU: tokens and logprobs of a request are the same to
the last bit alone, next to others, after a reused prefix, and after a preemption."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner, build_runner
from baton.settings.node_config import NodeSettings
from tests.unit.engine.tiny import EventRecorder, prompt_of, request, running
from tests.unit.models.tiny import save_tiny

LIMITS: dict[str, Any] = {"max_batch_requests": 6, "max_batch_tokens": 64}
PARAMS = ResolvedSampling(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=0)
FAMILIES = ["lfm2", "qwen3-next", "kimi-linear", "granite-hybrid", "bamba", "nemotron-h"]
MODELS = [
    *((family, "float32") for family in FAMILIES),
    *(pytest.param((family, "bfloat16"), marks=pytest.mark.slow) for family in FAMILIES),
]

Outputs = Mapping[str, list[TokenOutput]]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    family, dtype = request.param
    directory = tmp_path_factory.mktemp("model")
    save_tiny(family, directory)
    settings = NodeSettings(
        model=directory, device="cpu", num_blocks=40, block_size=4, batch_invariant=True, dtype=dtype, threads=1
    )
    return build_runner(settings)


async def alone(built: BuiltRunner, prompts: Mapping[str, Sequence[int]]) -> Outputs:
    events = EventRecorder()
    for name, prompt in prompts.items():
        async with running(built, **LIMITS) as (engine, events_of_one):
            engine.submit(request(name, tuple(prompt), PARAMS))
            await events_of_one.finished(name)
        events.tokens.update(events_of_one.tokens)
    return events.tokens


async def test_a_request_has_the_same_bits_alone_among_others_and_after_a_preemption(built: BuiltRunner) -> None:
    """The cache is too small for all of them."""
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (33, 45, 3, 1, 32, 41)}
    async with running(built, **LIMITS) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, PARAMS))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
    compared = dict(list(prompts.items())[:3] + list(prompts.items())[-1:])
    among = {name: events.tokens[name] for name in compared}
    assert among == await alone(built, compared)


async def test_a_request_has_the_same_bits_after_a_reused_prefix(built: BuiltRunner) -> None:
    prompt = prompt_of(100)
    prompts = {"first": prompt, "same": prompt, "longer": (*prompt, *prompt_of(30, seed=1))}
    async with running(built, **LIMITS) as (engine, events):
        for name, tokens in prompts.items():
            engine.submit(request(name, tokens, PARAMS))
            await events.finished(name)
    assert [events.started[name].cached_tokens for name in prompts] == [0, 64, 64]
    assert events.tokens["same"] == events.tokens["first"]
    assert events.tokens["longer"] == (await alone(built, {"longer": prompts["longer"]}))["longer"]
