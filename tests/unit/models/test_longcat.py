"""LongCat-Flash: its config as published, two places in the cache for each layer, and experts without weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from baton.core.errors import ConfigError
from baton.models.config.model_config import MLAConfig, ModelConfig, Scoring, TopKMethod
from baton.models.families.reader import read_config
from baton.models.kernels.moe.zero_experts import given_back
from baton.models.layers.moe.experts import Experts
from baton.models.layers.moe.moe import MoE, given_back_in_torch
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.loader import _build, load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import kv_cache_spec
from baton.planner.model_size import model_size
from tests.device import DEVICE
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.tiny import save_tiny

PUBLISHED: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_method": "MLA",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "routed_scaling_factor": 6.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 131072,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def test_longcat_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    attention, moe = config.attention, config.moe
    assert isinstance(attention, MLAConfig)
    assert moe is not None
    assert config.rope is not None
    assert (config.num_layers, config.attentions_per_layer, config.intermediate_size) == (28, 2, 12288)
    assert (attention.query_multiplier, attention.latent_multiplier) == (2.0, 12**0.5)
    assert config.attention_scale == pytest.approx(2 * 192**-0.5)
    assert (moe.num_experts, moe.zero_experts, moe.experts_per_token, moe.intermediate_size) == (512, 256, 12, 2048)
    assert (moe.scoring, moe.method, moe.normalize_weights) == (Scoring.SOFTMAX, TopKMethod.NOAUX_TC, False)
    assert (config.rope.theta, config.rope.interleaved) == (1e7, True)


def test_the_cache_has_two_places_for_each_layer(tmp_path: Path) -> None:
    spec = kv_cache_spec(read(tmp_path, PUBLISHED), "bfloat16")
    assert (spec.num_layers, spec.head_dim) == (56, 576)


def test_both_counts_of_layers_are_read(tmp_path: Path) -> None:
    """transformers counts attentions in `num_hidden_layers`."""
    config = read(tmp_path, PUBLISHED)
    assert read(tmp_path, PUBLISHED | {"num_hidden_layers": 56}) == config
    assert read(tmp_path, PUBLISHED | {"num_hidden_layers": 28}) == config


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_layers": None}, "num_layers is missing"),
        ({"num_hidden_layers": 14}, r"num_hidden_layers is 14.*56"),
        ({"router_bias": True}, "router_bias is True.*false"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True.*false"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora is False.*true"),
        ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora is False.*true"),
        ({"attention_bias": True}, "attention_bias is True.*false"),
        ({"attention_method": "MHA"}, "attention_method is 'MHA'.*MLA"),
        ({"zero_expert_type": "drop"}, "zero_expert_type is 'drop'.*identity"),
        ({"moe_topk": 769}, "moe_topk is 769.*768"),
        ({"qk_head_dim": 128}, "qk_head_dim is 128.*qk_nope_head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*silu"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, PUBLISHED | values)


def test_what_a_rank_weighs_is_what_is_planned_for(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED | {"num_layers": 2})
    local = local_config(config, TensorParallel(0, 8))
    model = _build(local, backend=backend_for(local), dtype=torch.bfloat16, device="meta")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    size = model_size(config)
    assert size.rank_bytes(8) == pytest.approx(weights, rel=0.01)
    assert size.kv_bytes == 2 * 2 * 576 * 2


def test_ranks_must_divide_the_dense_mlps_too(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED | {"ffn_hidden_size": 12289})
    with pytest.raises(ConfigError, match="its MLP has 12289 channels"):
        local_config(config, TensorParallel(0, 2))


def test_experts_without_weights_and_other_heads_may_be_in_the_checkpoint_or_not(tmp_path: Path) -> None:
    """transformers saves halves of them. The layers for multi-token prediction are not part of the model."""
    save_tiny("longcat", tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    zero_experts = [name for name in saved if ".experts.6." in name or ".experts.9." in name]
    assert zero_experts
    config = read_config(tmp_path)
    expected = logits_of(tmp_path, config)
    published = {
        name: tensor for name, tensor in saved.items() if not any(f".experts.{n}." in name for n in range(6, 10))
    }
    save_file(published | {"model.mtp.layers.0.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(tmp_path, config), expected)


def test_an_expert_that_the_config_does_not_count_is_refused(tmp_path: Path) -> None:
    save_tiny("longcat", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.10.up_proj.weight"] = torch.zeros(20, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 unexpected: model\.layers\.0\.mlp\.experts\.10\.up_proj"):
        logits_of(tmp_path, read_config(tmp_path))


def logits_of(directory: Path, config: ModelConfig) -> torch.Tensor:
    backend = backend_for(config)
    model = load_model(directory, config, backend=backend, dtype="float32", device="cpu")
    return PagedDriver(model, backend).step({"r": list(range(20))})["r"]


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_experts_without_weights_have_no_part_in_the_products_of_a_gpu(num_tokens: int) -> None:
    torch.manual_seed(0)
    experts = Experts(3, 64, 32, dtype=torch.float32, zero_experts=2).requires_grad_(requires_grad=False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    x_TD, weights_TK = torch.randn(num_tokens, 64), torch.rand(num_tokens, 3)
    experts_TK = torch.rand(num_tokens, 5).topk(3).indices
    expected = experts(x_TD, weights_TK, experts_TK)
    experts.to(DEVICE)
    ours = experts.run_grouped(x_TD.to(DEVICE), weights_TK.to(DEVICE), experts_TK.to(DEVICE)).cpu()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_a_gpu_gives_back_what_the_twin_does(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_TD = torch.randn(num_tokens, 2 * 2100).to(dtype)[:, :2100]
    weights_TK, experts_TK = torch.rand(num_tokens, 5), torch.rand(num_tokens, 9).topk(5).indices.int()
    expected = given_back_in_torch(x_TD, weights_TK, experts_TK, first=4)
    ours = given_back(x_TD.to(DEVICE), weights_TK.to(DEVICE), experts_TK.to(DEVICE), first=4)
    torch.testing.assert_close(ours.cpu(), expected)


def test_a_token_whose_experts_all_lack_weights_is_given_back_with_their_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    moe = read(tmp_path, PUBLISHED | {"n_routed_experts": 2, "zero_expert_num": 4, "moe_topk": 3}).moe
    assert moe is not None
    layer = MoE(8, moe, dtype=torch.float32).requires_grad_(requires_grad=False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    assert layer.gate.e_score_correction_bias is not None
    layer.gate.e_score_correction_bias[:2] = -10.0
    x_TD = torch.randn(5, 8)
    weights_TK, experts_TK = layer.gate(x_TD)
    assert experts_TK.min() >= 2
    torch.testing.assert_close(layer(x_TD), x_TD * weights_TK.sum(dim=1, keepdim=True))
