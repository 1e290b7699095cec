"""config.json as publishers of the families with layer norms write it, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.models.config.decoder import alibi_slopes
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.rope import RopeConfig
from baton.models.families.dense.layer_norm_config import Activation, LayerNormSwitches, Projection
from baton.models.families.reader import read_config

STARCODER2: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 18432,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 36,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "use_bias": True,
    "vocab_size": 49152,
}
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 3,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GPT_NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 50432,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
OPT: dict[str, Any] = {
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "do_layer_norm_before": False,
    "eos_token_id": 2,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "max_position_embeddings": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}
MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "d_model": 4096,
    "emb_pdrop": 0,
    "expansion_ratio": 4,
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 2048,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "torch_dtype": "bfloat16",
    "vocab_size": 50432,
}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def attention_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def test_starcoder2_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, STARCODER2)
    attention = attention_of(config)
    assert attention.sliding_windows == (4096,) * 32
    assert (attention.qkv_bias, attention.output_bias, config.mlp_bias) == (True, True, True)
    assert config.rope == RopeConfig(128, 1e6, interleaved=False, scaling=None)
    assert config.tie_word_embeddings
    assert config.switches == LayerNormSwitches(Activation.GELU_TANH)


def test_nemotron_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, NEMOTRON)
    assert config.rope == RopeConfig(64, 1e4, interleaved=False, scaling=None)
    assert config.switches == LayerNormSwitches(Activation.SQUARED_RELU, norm_weight_offset=1)
    assert config == read(tmp_path, NEMOTRON | {"partial_rotary_factor": None, "rope_percent": 0.5})


def test_gpt_neox_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_NEOX)
    assert config.rope == RopeConfig(24, 1e4, interleaved=False, scaling=None)
    assert config.switches == LayerNormSwitches(Activation.GELU_TANH, projection=Projection.BY_HEAD, parallel=True)
    newer = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert config == read(tmp_path, GPT_NEOX | {"rotary_pct": None, "rotary_emb_base": None, "rope_parameters": newer})


def test_gpt2_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GPT2)
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (12, 12, 64)
    assert config.max_context_tokens == 1024
    assert config.intermediate_size == 3072
    assert config.rope is None
    assert config.tie_word_embeddings


def test_opt_350m_differs_from_the_others(tmp_path: Path) -> None:
    switches = read(tmp_path, OPT).switches
    assert isinstance(switches, LayerNormSwitches)
    assert (switches.norm_after, switches.final_norm, switches.embedding_size) == (True, False, 512)
    others = read(tmp_path, OPT | {"do_layer_norm_before": True, "word_embed_proj_dim": 1024})
    assert others.switches == LayerNormSwitches(Activation.RELU, position_offset=2)
    assert others.max_context_tokens == 2048


def test_mpt_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, MPT)
    assert attention_of(config).alibi_slopes == alibi_slopes(32)
    assert attention_of(config).scale == 128**-0.5
    assert config.max_context_tokens == 2048
    assert config.switches == LayerNormSwitches(Activation.GELU, projection=Projection.JOINED, norm_bias=False)
    for name in ("MptForCausalLM", "MPTForCausalLM"):
        assert read(tmp_path, MPT | {"architectures": [name]}).num_layers == 32


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (STARCODER2 | {"norm_type": "rms_norm"}, "norm_type"),
        (STARCODER2 | {"hidden_act": "quick_gelu"}, "hidden_act"),
        (STARCODER2 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (NEMOTRON | {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GPT_NEOX | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (OPT | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (MPT | {"no_bias": False}, "no_bias"),
        (MPT | {"norm_type": "rmsnorm"}, "norm_type"),
        (MPT | {"logit_scale": 0.5}, "logit_scale"),
        (MPT | {"attn_config": {"alibi": False}}, "alibi"),
        (MPT | {"attn_config": {"alibi_bias_max": 4}}, "alibi_bias_max"),
        (MPT | {"attn_config": {"qk_ln": True}}, "qk_ln"),
        (MPT | {"attn_config": {"prefix_lm": True}}, "prefix_lm"),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
    ],
)
def test_what_changes_the_computation_is_refused_by_name(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
