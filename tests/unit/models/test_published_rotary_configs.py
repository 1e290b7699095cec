"""config.json as published, of families in which part of a head turns, or whose rotary tables have sections."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.rope import LongRopeScaling, RopeConfig
from baton.models.families.dense.llama_switches import LlamaSwitches
from baton.models.families.dense.stablelm_config import StableLMSwitches
from baton.models.families.reader import read_config

PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
PHI4_MINI = PHI3_MINI_4K | {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
QWEN25_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vocab_size": 152064,
}
QWEN3_VL_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "hidden_size": 1024},
}
STABLELM_2_12B: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"],
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.25,
    "qk_layernorm": True,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_parallel_residual": True,
    "use_qkv_bias": False,
    "vocab_size": 100352,
}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def gqa_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def test_phi3_mini_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, PHI3_MINI_4K)
    assert config.rope == RopeConfig(96, 10000.0, interleaved=False, scaling=None)
    assert gqa_of(config).sliding_windows == (2047,) * 32
    assert config.switches == LlamaSwitches(in_one_tensor=("qkv_proj", "gate_up_proj"))
    assert (config.norm_eps, config.max_context_tokens) == (1e-5, 4096)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi4_mini_is_read_as_published(name: str, tmp_path: Path) -> None:
    """Older files have LongRoPE by other names."""
    config = read(tmp_path, PHI4_MINI | {"rope_scaling": PHI4_MINI["rope_scaling"] | {"type": name}})
    assert config.rope is not None
    assert config.rope.dim == 96
    assert isinstance(config.rope.scaling, LongRopeScaling)
    assert config.rope.scaling.rotary_scale == pytest.approx(1.190238)  # sqrt(1 + log(32) / log(4096))
    assert gqa_of(config).sliding_windows == (None,) * 32
    assert (config.max_context_tokens, config.for_context(131072).max_context_tokens) == (4096, 131072)


def test_qwen25_vl_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN25_VL_7B)
    assert config.rope == RopeConfig(128, 1e6, interleaved=False, scaling=None)
    assert gqa_of(config).qkv_bias
    assert (config.num_layers, config.vocab_size, config.max_context_tokens) == (28, 152064, 128000)


def test_qwen3_vl_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_VL_4B)
    assert config.rope == RopeConfig(128, 5e6, interleaved=False, scaling=None)
    assert gqa_of(config).qk_norm
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"


def test_stablelm_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, STABLELM_2_12B)
    assert config.rope == RopeConfig(40, 10000.0, interleaved=False, scaling=None)
    assert config.switches == StableLMSwitches(parallel=True, qk_norm_heads=(32, 8))
