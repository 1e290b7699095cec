"""Batch-invariant mode on a CPU: a request's logits in float32 have the same bits alone and in any batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.core.errors import InternalError
from baton.models.kernels.matmul.matmul import multiply_invariant
from baton.models.layers.linear import Linear
from baton.models.layers.products import make_batch_invariant
from tests.invariance import Invariant, Lengths, differences
from tests.unit.models.tiny import save_tiny

SIZES = (2, 7, 33)
LENGTHS = Lengths(prompt=37, outputs=7, chunk=16, longest=50)
FAMILIES = [
    "llama-llama3-tied",
    "mistral-window",
    "deepseek-v2",
    "deepseek-v3-yarn",
    "deepseek-v32",
    "longcat",
    "glm-moe-dsa-shared-selection",
    "gemma2",
    "llama4",
    "gpt-oss",
    "falcon-new",
    "bloom",
    "qwen2-moe",
    "olmo2",
    "cohere-norms-untied",
    "apertus",
    "ministral3",
    "hunyuan-dense",
    "gpt2",
    "gpt-neox",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_has_the_same_logits_alone_and_in_any_batch(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = Invariant(tmp_path, device="cpu", dtype="float32")
    assert differences(model, LENGTHS, SIZES) == {size: [] for size in SIZES}


ODD = {"hidden_size": 60, "intermediate_size": 50}
ODD_SIZES = [
    ("qwen3-moe", {"hidden_size": 54, "num_experts": 9, "num_experts_per_tok": 9, "moe_intermediate_size": 27}),
    ("gemma3", {**ODD, "head_dim": 22}),
    ("llama", {**ODD, "head_dim": 14}),
    ("mistral-window", {**ODD, "head_dim": 30}),
    ("gemma2", {**ODD, "head_dim": 22}),
    ("gemma3n", {**ODD, "hidden_size_per_layer_input": 7}),
    ("gemma4-wide-mlps", {**ODD, "hidden_size_per_layer_input": 7}),
    ("gpt2", {"n_embd": 60, "n_inner": 50}),
    ("deepseek-v2", {**ODD, "kv_lora_rank": 22, "v_head_dim": 11, "qk_nope_head_dim": 13, "moe_intermediate_size": 27}),
    ("gpt-oss", {**ODD, "head_dim": 22}),
]


@pytest.mark.parametrize(("name", "sizes"), ODD_SIZES, ids=[name for name, _ in ODD_SIZES])
def test_so_it_has_with_sizes_that_no_vector_instruction_divides(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(name, tmp_path, changed=sizes)
    model = Invariant(tmp_path, device="cpu", dtype="float32")
    assert differences(model, LENGTHS, SIZES[1:]) == {size: [] for size in SIZES[1:]}


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_a_chunk_of_one_token_is_no_exception(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = Invariant(tmp_path, device="cpu", dtype="float32", workspace_tokens=5)
    assert differences(model, replace(LENGTHS, prompt=LENGTHS.chunk + 1, outputs=2), SIZES) == {
        size: [] for size in SIZES
    }


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_without_the_mode_they_differ(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = Invariant(tmp_path, device="cpu", dtype="float32", batch_invariant=False)
    assert any(differences(model, LENGTHS, SIZES).values())


def test_a_product_that_is_not_known_is_refused() -> None:
    layer = Linear(4, 4, dtype=torch.float32)
    make_batch_invariant(nn.Sequential(layer))
    assert layer.multiply is multiply_invariant
    layer.multiply = lambda x, weight, bias: x
    with pytest.raises(InternalError, match="may depend on the batch"):
        make_batch_invariant(nn.Sequential(layer))
