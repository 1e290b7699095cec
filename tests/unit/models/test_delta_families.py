"""Families with a delta rule: files as publishers write them, prompts of several sub-chunks, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig
from baton.models.families.hybrid.delta_config import DeltaSwitches
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.loader import load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import kv_cache_spec
from tests.unit.models.paged import backend_for
from tests.unit.models.test_equals_transformers import Pair, assert_equal, in_pieces, tokens_of
from tests.unit.models.tiny import save_tiny

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_5_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
}
QWEN3_5_MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": QWEN3_5_TEXT,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"depth": 27},
}
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def test_qwen3_next_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT)
    attention, recurrent, moe = config.attention, config.recurrent, config.moe
    assert isinstance(attention, GQAConfig)
    assert recurrent is not None
    assert moe is not None
    assert (attention.num_kv_heads, attention.head_dim, attention.output_gate) == (2, 256, True)
    assert recurrent.layers == ((True,) * 3 + (False,)) * 12
    assert config.switches == DeltaSwitches(128, 128, 2, 4, by_key_head=True)
    assert config.rope is not None
    assert (config.rope.dim, config.rope.theta) == (64, 1e7)
    assert (moe.num_experts, moe.experts_per_token, moe.shared_gate, moe.normalize_weights) == (512, 10, True, True)
    spec = kv_cache_spec(config, "bfloat16")
    assert spec.num_layers == 12
    assert spec.state is not None
    assert (spec.state.num_layers, spec.state.num_kv_heads, spec.state.head_dim) == (36, 16, 512 * 3 + 2 * 128 * 128)


def test_qwen3_5_moe_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_5_MOE)
    assert config.recurrent is not None
    assert config.recurrent.num_layers == 30
    assert config.switches == DeltaSwitches(128, 128, 2, 4)
    assert config.rope is not None
    assert config.rope.dim == 64
    assert config.moe is not None
    assert all(config.moe.layers)
    assert config.mtp_layers == 1


def test_kimi_linear_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, KIMI_LINEAR)
    recurrent, moe = config.recurrent, config.moe
    assert isinstance(config.attention, MLAConfig)
    assert recurrent is not None
    assert moe is not None
    assert [index for index, keeps in enumerate(recurrent.layers) if not keeps] == [3, 7, 11, 15, 19, 23, 26]
    assert config.switches == DeltaSwitches(128, 128, 1, 4)
    assert config.rope is None
    assert config.max_context_tokens == 1048576
    assert (moe.num_experts, moe.experts_per_token, moe.weight_scale) == (256, 8, 2.446)
    assert moe.layers == (False,) + (True,) * 26
    spec = kv_cache_spec(config, "bfloat16")
    assert (spec.num_layers, spec.head_dim) == (7, 576)


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (QWEN3_NEXT | {"linear_num_value_heads": 24}, "linear_num_value_heads", "multiple of linear_num_key_heads, 16"),
        (QWEN3_NEXT | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim", "at least 2"),
        (QWEN3_NEXT | {"layer_types": ["linear_attention"] * 48}, "layer_types", "both kinds"),
        (QWEN3_NEXT | {"layer_types": ["mamba"] * 48}, "layer_types", "linear_attention"),
        (QWEN3_NEXT | {"attn_output_gate": False}, "attn_output_gate", "true"),
        (KIMI_LINEAR | {"mla_use_nope": False}, "mla_use_nope", "true"),
        (KIMI_LINEAR | {"linear_attn_config": None}, "linear_attn_config", "missing"),
        (
            KIMI_LINEAR | {"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | {"kda_layers": [1, 2]}},
            "kda_layers",
            "from 1 to 27",
        ),
        (KIMI_LINEAR | {"moe_router_activation_func": "softmax"}, "moe_router_activation_func", "sigmoid"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_that_cannot_share_key_heads_are_refused_with_those_that_can(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT | {"linear_num_key_heads": 2, "linear_num_value_heads": 2})
    with pytest.raises(ConfigError, match="recurrent layers have 2 heads") as refused:
        local_config(config, TensorParallel(0, 4))
    assert refused.value.allowed == ("1", "2")


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "kimi-linear"])
def test_prompts_of_several_sub_chunks_in_any_pieces(name: str, tmp_path: Path) -> None:
    pair = Pair(name, tmp_path)
    tokens = tokens_of(4, 150)
    expected = pair.expected(tokens)
    assert_equal(pair.driver().step({"r": tokens})["r"], expected)
    first: dict[int, int] = {0: 64, 64: 64}
    second: dict[int, int] = {0: 50, 50: 90}
    assert_equal(in_pieces(pair.driver(), tokens, lambda start: first.get(start, 1)), expected)
    assert_equal(in_pieces(pair.driver(), tokens, lambda start: second.get(start, 1)), expected)


def test_tensors_of_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    save_tiny("qwen3.5", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    load_model(tmp_path, config, backend=backend_for(config), dtype="float32", device="cpu")
