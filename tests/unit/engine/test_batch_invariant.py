"""Batch-invariant mode through the engine on a CPU: a request's tokens and their logprobs in float32 are the same to
the last bit, alone and next to other requests."""

from dataclasses import replace
from typing import Any

import pytest

from baton.core.sampling import ResolvedSampling
from baton.engine.build import BuiltRunner, build_runner
from baton.settings.node_config import NodeSettings
from tests.gpu.demo import Output, generate
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny import save_tiny

LIMITS: dict[str, Any] = {"max_batch_requests": 8, "max_batch_tokens": 64}
PARAMS = ResolvedSampling(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=["mistral-window", "deepseek-v3-yarn"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    directory = tmp_path_factory.mktemp("model")
    save_tiny(request.param, directory)
    return build_runner(NodeSettings(model=directory, device="cpu", num_blocks=128, block_size=4, batch_invariant=True))


def outputs(built: BuiltRunner, *prompts: tuple[int, ...], **more: Any) -> list[Output]:
    return generate(built, prompts, more.pop("params", PARAMS), prefix_cache=False, **LIMITS, **more)


def test_a_request_has_the_same_logprobs_alone_and_in_a_batch(built: BuiltRunner) -> None:
    prompts = [prompt_of(length, seed=length) for length in (17, 37, 3, 16, 1, 50, 9)]
    together = outputs(built, *prompts)
    for prompt, output in zip(prompts[:3], together, strict=False):
        assert outputs(built, prompt) == [output]


def test_an_output_has_the_same_logprobs_after_its_first_tokens_were_computed_again(built: BuiltRunner) -> None:
    prompts = [prompt_of(length, seed=length) for length in (21, 37, 3)]
    long = replace(PARAMS, max_tokens=36)
    whole = outputs(built, *prompts, params=long)
    for lost in (1, 6, 32):
        known = [output.token_ids[:lost] for output in whole]
        rest = outputs(built, *prompts, params=long, known=known)
        assert rest == [Output(output.token_ids[lost:], output.logprobs[lost:]) for output in whole]
