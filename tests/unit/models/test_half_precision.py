"""Models in bfloat16 lose no more to rounding than transformers does: both compute the same parts in float32.

Weights are rounded first, so that only the computation differs. A layer norm or the angles of a rotation in bfloat16
lose 1.14 times as much or more; ours lost 0.71 to 0.97 times as much.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from baton.models.families.dense.gemma import GemmaForCausalLM, GemmaRMSNorm
from baton.models.families.reader import read_config
from baton.models.loading.loader import load_model
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.tiny import VOCAB_SIZE, save_tiny

PROMPTS, PROMPT_TOKENS = 4, 40


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma2", "gemma3", "llama4-dense-untuned", "falcon-rw", "falcon-new", "bloom"),
        *("starcoder2", "nemotron", "gpt-neox", "gpt2", "opt-norms-after-projections", "mpt"),
    ],
)
def test_bfloat16_loses_no_more_than_in_transformers(name: str, tmp_path: Path) -> None:
    exact = save_tiny(name, tmp_path)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    exact.save_pretrained(tmp_path)
    implementation = exact.config._attn_implementation
    theirs = type(exact).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation=implementation)
    config = read_config(tmp_path)
    backend = backend_for(config, "bfloat16")
    model = load_model(tmp_path, config, backend=backend, dtype="bfloat16", device="cpu")
    prompts = torch.randint(VOCAB_SIZE, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, their_logits = exact(prompts).logits, theirs(prompts).logits.float()
    ours = torch.stack([PagedDriver(model, backend, "bfloat16").step({"r": row.tolist()})["r"] for row in prompts])

    def loss(logits: Tensor) -> float:
        return float((logits - expected).square().mean().sqrt() / expected.std())

    assert loss(ours) <= 1.05 * loss(their_logits)


def test_gemmas_embedding_is_scaled_by_a_rounded_number(tmp_path: Path) -> None:
    theirs = save_tiny("gemma3", tmp_path).bfloat16().model.embed_tokens
    config = read_config(tmp_path)
    model = load_model(
        tmp_path, config, backend=backend_for(config, "bfloat16"), dtype="bfloat16", device="cpu", load_format="dummy"
    )
    assert isinstance(model, GemmaForCausalLM)
    assert model.embedding_scale == theirs.embed_scale.item() != config.hidden_size**0.5


def test_gemmas_norm_adds_1_to_its_weights_in_float32() -> None:
    torch.manual_seed(0)
    theirs, ours = Gemma3RMSNorm(64).bfloat16(), GemmaRMSNorm(64, eps=1e-6, dtype=torch.bfloat16)
    weight, x_TD = torch.randn(64).bfloat16(), torch.randn(100, 64).bfloat16()
    with torch.no_grad():
        theirs.weight.copy_(weight)
        ours.weight.copy_(weight)
        assert float((ours(x_TD) == theirs(x_TD)).float().mean()) > 0.99
