"""Rows in order through the engine on a CPU: tokens and logprobs in float32 are the same to the last bit however a
prompt is cut, after known output was computed again with the prompt, and after decoded KV was used for a longer
prompt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.sampling import ResolvedSampling
from baton.engine.build import BuiltRunner, build_runner
from baton.settings.node_config import NodeSettings
from tests.gpu.demo import Output, generate
from tests.unit.engine.tiny import prompt_of, request, running
from tests.unit.models.tiny import save_tiny

PARAMS = ResolvedSampling(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, logprobs=0)
PROMPTS = [prompt_of(length, seed=length) for length in (37, 3, 18, 1)]
ATTENTION = ["mistral-window", "deepseek-v3-yarn", "deepseek-v32", "gpt-oss", "gemma3"]
RECURRENT = ["lfm2", "qwen3-next", "kimi-linear", "nemotron-h", "falcon-h1", "granite-hybrid"]


@pytest.fixture(scope="module", params=[*ATTENTION, *RECURRENT])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    return built_of(request.param, tmp_path_factory.mktemp("model"))


def built_of(family: str, directory: Path) -> BuiltRunner:
    save_tiny(family, directory)
    return build_runner(NodeSettings(model=directory, device="cpu", num_blocks=256, block_size=4, batch_invariant=True))


def outputs(built: BuiltRunner, prompts: list[tuple[int, ...]] = PROMPTS, **more: Any) -> list[Output]:
    options: dict[str, Any] = {"prefix_cache": False, "max_batch_requests": 8, "max_batch_tokens": 64, **more}
    return generate(built, prompts, options.pop("params", PARAMS), **options)


def test_any_step_size_cuts_prompts_without_a_change(built: BuiltRunner) -> None:
    whole = outputs(built)
    for step_tokens in (8, 13):
        assert outputs(built, max_batch_tokens=step_tokens) == whole
    assert outputs(built, PROMPTS[:1]) == whole[:1]


def test_known_tokens_are_computed_with_the_prompt(built: BuiltRunner) -> None:
    whole = outputs(built)
    for lost in (1, 6, 11):
        known = [output.token_ids[:lost] for output in whole]
        rest = outputs(built, known=known)
        assert rest == [Output(output.token_ids[lost:], output.logprobs[lost:]) for output in whole]


async def test_a_prompt_that_goes_on_after_an_answer_uses_its_decoded_kv(built: BuiltRunner) -> None:
    """States are kept after every 64 tokens."""
    count, cached = (12, 48) if built.config.recurrent is None else (30, 64)
    async with running(built, max_batch_tokens=64) as (engine, events):
        engine.submit(request("first", PROMPTS[0], replace(PARAMS, max_tokens=count)))
        await events.finished("first")
        longer = (*PROMPTS[0], *(token.token_id for token in events.tokens["first"]), 7, 9)
        engine.submit(request("longer", longer, PARAMS))
        await events.finished("longer")
    assert events.started["longer"].cached_tokens == cached > len(PROMPTS[0]) + 10
    async with running(built, max_batch_tokens=64, prefix_cache=False) as (engine, alone):
        engine.submit(request("longer", longer, PARAMS))
        await alone.finished("longer")
    assert alone.started["longer"].cached_tokens == 0
    assert alone.tokens["longer"] == events.tokens["longer"]
