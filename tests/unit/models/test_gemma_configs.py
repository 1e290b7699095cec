"""config.json of the Gemma families as published, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from models.config.model_config import GQAConfig, ModelConfig
from models.config.reader import read_config
from models.families.gemma_config import NormsBefore

GEMMA1: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def attention_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def test_gemma1_as_first_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA1)
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 1, 256)
    assert attention.scale == 1 / 16
    assert config.tie_word_embeddings
    assert config.switches == NormsBefore("post_attention_layernorm")


@pytest.mark.parametrize(
    ("values", "field", "allowed"),
    [
        (GEMMA1 | {"hidden_act": "silu"}, "hidden_act", "gelu_pytorch_tanh"),
        (GEMMA1 | {"hidden_activation": "gelu"}, "hidden_activation", "gelu_pytorch_tanh"),
        (GEMMA1 | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "false"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, values: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, values)
    assert error.value.field == field
    assert allowed in str(error.value)
