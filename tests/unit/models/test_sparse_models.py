"""Models that attend to selected tokens: their configs, and whole models with kernels in place of plain torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.backends.flashinfer_mla import FlashInferMLA
from attention.platform import probe_platform
from attention.selection import BACKENDS, reasons_against
from baton.core.errors import ConfigError
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.models.config.model_config import IndexConfig, MLAConfig, ModelConfig
from baton.models.families.reader import read_config
from baton.models.loading.loader import load_model
from baton.models.loading.needs import attention_needs, kv_cache_spec
from tests.unit.models.paged import PagedDriver, backend_for, cache_shape
from tests.unit.models.test_equals_transformers import tokens_of
from tests.unit.models.tiny import save_tiny

DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM_5 = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rope_scaling": None,
    "v_head_dim": 256,
}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def index_of(config: ModelConfig) -> IndexConfig:
    assert isinstance(config.attention, MLAConfig)
    assert config.attention.index is not None
    return config.attention.index


def test_deepseek_v32_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V32)
    assert index_of(config) == IndexConfig(64, 128, 2048, interleaved=False, layers=(True,) * 61)
    spec = kv_cache_spec(config, "bfloat16", "float8_e4m3fn")
    assert spec.index == KVCacheSpec(KVKind.MLA, 61, 1, 128, "float8_e4m3fn")
    assert (spec.head_dim, spec.num_layers) == (576, 61)
    assert config.rope is not None
    assert config.rope.interleaved


def test_glm_5_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GLM_5)
    assert index_of(config) == IndexConfig(32, 128, 2048, interleaved=True, layers=(True,) * 78)
    assert config.moe is not None
    assert config.moe.layers == (False,) * 3 + (True,) * 75


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"indexer_types": ["full", "shared", "full", "full", "shared"]}, "FSFFS"),
        ({"index_topk_pattern": "FSSFS"}, "FSSFS"),
        ({"index_topk_pattern": ["full", "full", "shared", "full", "shared"]}, "FFSFS"),
        ({"index_topk_freq": 2}, "FFSFS"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, "FFFSS"),
        ({"index_topk_freq": 0}, "FFFFF"),
    ],
)
def test_which_layers_of_glm_5_select(fields: dict[str, Any], layers: str, tmp_path: Path) -> None:
    index = index_of(read(tmp_path, GLM_5 | {"num_hidden_layers": 5} | fields))
    assert index.layers == tuple(letter == "F" for letter in layers)
    spec = kv_cache_spec(read_config(tmp_path), "bfloat16")
    assert spec.index is not None
    assert spec.index.num_layers == layers.count("F")
    assert index.cache_layer(3) == layers[:3].count("F")


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_both_names_of_layers_that_select_are_read(kind: str, tmp_path: Path) -> None:
    assert read(tmp_path, GLM_5 | {"layer_types": [kind] * 78}) == read(tmp_path, GLM_5)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"indexer_types": ["shared"] * 78}, "indexer_types"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"index_topk_pattern": "FX"}, "index_topk_pattern"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "index_skip_topk_offset"),
        ({"index_topk": 0}, "index_topk"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"layer_types": ["full_attention"] * 78}, "layer_types"),
        ({"layer_types": ["deepseek_sparse_attention"]}, "layer_types"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, GLM_5 | fields)
    assert refused.value.field == name


def test_backends_that_do_not_select_give_that_as_their_reason(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V32)
    needs = attention_needs(config, dtype="bfloat16", device="cpu", shape=cache_shape(config), max_num_reqs=4)
    platform = probe_platform("cpu")
    assert "no sparse" in reasons_against(FlashInferMLA.capabilities, needs, platform)
    assert not reasons_against(
        next(each.capabilities for each in BACKENDS if each.capabilities.name == "TRITON_MLA"), needs, platform
    )


@pytest.mark.slow
def test_kernels_and_plain_torch_give_the_same_logits(tmp_path: Path) -> None:
    save_tiny("glm-moe-dsa-shared-selection", tmp_path)
    config = read_config(tmp_path)
    needs = attention_needs(config, dtype="float32", device="cpu", shape=cache_shape(config), max_num_reqs=8)
    kernels = next(each for each in BACKENDS if each.capabilities.name == "TRITON_MLA")
    drivers = []
    for backend in (kernels(needs, probe_platform("cpu"), context_workspace_tokens=64), backend_for(config)):
        model = load_model(tmp_path, config, backend=backend, dtype="float32", device="cpu")
        drivers.append(PagedDriver(model, backend))
    first, second = tokens_of(0, 24), tokens_of(1, 24)
    for batch in ({"a": first[:11], "b": second[:3]}, {"a": first[11:12], "b": second[3:12]}):
        ours, expected = (driver.step(batch) for driver in drivers)
        for request, logits in expected.items():
            torch.testing.assert_close(ours[request], logits, rtol=1e-4, atol=1e-4)


def test_what_is_selected_matters(tmp_path: Path) -> None:
    """Otherwise equal logits would prove nothing."""
    dense = save_tiny("deepseek-v32", tmp_path)
    tokens = torch.tensor([tokens_of(0, 20)])
    with torch.inference_mode():
        expected = dense(tokens).logits
        for layer in dense.model.layers:
            layer.self_attn.indexer.index_topk = 64
        assert float((dense(tokens).logits - expected).abs().max()) > 0.1
