"""Batch-invariant mode through the engine on a CPU: a request's tokens and their logprobs in float32 are the same to
the last bit, alone and next to other requests."""

from pathlib import Path
from typing import Any

import pytest

from baton.config import NodeSettings
from baton.types import SamplingParams
from engine.build import build_runner
from tests.gpu.demo import Output, generate
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny import save_tiny

CHUNK = 16
PARAMS = SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("name", ["mistral-window", "deepseek-v3-yarn"])
def test_a_request_has_the_same_logprobs_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    built = build_runner(NodeSettings(model=tmp_path, device="cpu", num_blocks=128, block_size=4, batch_invariant=True))
    limits: dict[str, Any] = {"chunk_align_tokens": CHUNK, "max_batch_requests": 8, "max_batch_tokens": 64}
    prompts = [prompt_of(length, seed=length) for length in (CHUNK + 1, 37, 3, CHUNK, 1, 50, 9)]

    def outputs(*of: tuple[int, ...]) -> list[Output]:
        return generate(built, of, PARAMS, prefix_cache=False, **limits)

    together = outputs(*prompts)
    for prompt, output in zip(prompts[:3], together, strict=False):
        assert outputs(prompt) == [output]
