"""Drafts on a GPU: in batch-invariant mode every draw has the bits of decoding, in captured steps and outside of
them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.device.graphs import GraphSettings
from baton.settings.config import DEMO_MODELS
from tests.gpu.demo import build_demo
from tests.unit.engine.drafted import DRAFTERS, Asked, token_by_token, with_drafts
from tests.unit.engine.driver import runner_of
from tests.unit.models.tiny import save_tiny

pytestmark = pytest.mark.gpu

COUNT = 24
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 5, "logprobs": 0},
    {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1},
)
ASKED = {
    f"r{number}": Asked([(number * 997 + place * place * 31) % 4000 for place in range(20 + 90 * number)], sampling)
    for number, sampling in enumerate(SAMPLINGS)
}


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_drafts_have_the_bits_of_decodes(model: str, cache: str) -> None:
    built = build_demo(
        DEMO_MODELS / model, dtype="bfloat16", batch_invariant=True, kv_cache_dtype=cache, cuda_graphs=False
    )
    sizes = GraphSettings(max_requests=32, max_context_tokens=512, max_tokens=512)
    eager, captured = runner_of(built, graphs=None), runner_of(built, graphs=sizes)
    captured.prepare()
    expected = token_by_token(eager, ASKED, COUNT)
    for drafter in DRAFTERS.values():
        for runner in (eager, captured):
            assert with_drafts(runner, ASKED, expected, drafter())[0] == expected
    assert captured.launches["decode_graph"] > len(DRAFTERS)


@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "kimi-linear", "nemotron-h"])
def test_drafts_of_models_with_recurrent_states_have_the_bits_of_decodes(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    built = build_demo(tmp_path, dtype="bfloat16", batch_invariant=True, cuda_graphs=False, block_size=16)
    asked = {name: replace(each, prompt=[token % 60 for token in each.prompt[:60]]) for name, each in ASKED.items()}
    sizes = GraphSettings(max_requests=32, max_context_tokens=128, max_tokens=256)
    eager, captured = runner_of(built, graphs=None), runner_of(built, graphs=sizes)
    captured.prepare()
    expected = token_by_token(eager, asked, COUNT)
    for drafter in ("right", "wrong at 1", "any"):
        for runner in (eager, captured):
            assert with_drafts(runner, asked, expected, DRAFTERS[drafter]())[0] == expected
    assert captured.launches["decode_graph"] > 0
