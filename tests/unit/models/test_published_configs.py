"""config.json as publishers of the newer families write it, with fields left to defaults, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.rope import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from baton.models.families.dense.bloom_config import BloomSwitches
from baton.models.families.dense.falcon_config import FalconSwitches
from baton.models.families.moe.gpt_oss_config import GptOssSwitches
from baton.models.families.moe.llama4_config import Llama4Switches, TemperatureTuning
from baton.models.families.reader import read_config

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "eos_token_id": [200001, 200007, 200008],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
FALCON_RW: dict[str, Any] = {
    "alibi": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "bias": True,
    "eos_token_id": 2,
    "hidden_size": 2048,
    "layer_norm_epsilon": 1e-05,
    "multi_query": False,
    "new_decoder_architecture": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 50304,
}
FALCON_40B = FALCON_RW | {
    "alibi": False,
    "bias": False,
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "parallel_attn": True,
}
BLOOM: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_softmax_in_fp32": True,
    "eos_token_id": 2,
    "n_embed": 1024,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 24,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "slow_but_exact": False,
    "vocab_size": 250880,
}


def text(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """`config` with other fields of its language model."""
    return config | {"text_config": config["text_config"] | fields}


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def attention_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def test_gemma2_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA2)
    attention = attention_of(config)
    assert attention.sliding_windows == (4096, None) * 23
    assert attention.scale == 144**-0.5
    assert attention.logits_soft_cap == 50.0
    assert not attention.qk_norm
    assert config.final_logits_soft_cap == 30.0
    assert config.tie_word_embeddings
    assert config.local_rope is None


def test_gemma2_null_is_not_the_default(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert attention_of(config).logits_soft_cap is None
    assert config.final_logits_soft_cap is None


def test_gemma3_that_also_sees_leaves_most_to_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3)
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert attention.sliding_windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert attention.qk_norm
    assert attention.logits_soft_cap is None
    assert config.rope == RopeConfig(256, 1e6, interleaved=False, scaling=LinearScaling(8.0))
    assert config.local_rope == RopeConfig(256, 1e4, interleaved=False, scaling=None)
    assert config.vocab_size == 262208
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (1, 106)
    assert config.tie_word_embeddings


def test_gemma3_ropes_are_read_in_both_spellings(tmp_path: Path) -> None:
    older = read(tmp_path, GEMMA3)
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert read(tmp_path, text(GEMMA3, rope_scaling=None, rope_parameters=ropes)) == older


def test_llama4_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA4)
    attention, moe = attention_of(config), config.moe
    assert attention.attention_chunk_sizes == (8192, 8192, 8192, None) * 12
    assert config.switches == Llama4Switches((True, True, True, False) * 12, True, TemperatureTuning(8192, 0.1))
    assert config.rope is not None
    assert config.rope.interleaved
    assert config.rope.scaling == Llama3Scaling(16.0, 1.0, 1.0, 8192)
    assert config.max_context_tokens == 10485760
    assert config.intermediate_size == 16384
    assert moe is not None
    assert moe.layers == (True,) * 48
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (16, 1, 8192)
    assert moe.shared_intermediate_size == 8192
    assert config.eos_token_ids == (200001, 200007, 200008)


@pytest.mark.parametrize(("published", "tuned"), [(4, True), (0, False), (None, False), (True, True), (False, False)])
def test_llama4_says_with_a_number_that_late_queries_are_sharper(
    tmp_path: Path, published: int | None, tuned: bool
) -> None:
    switches = read(tmp_path, text(LLAMA4, attn_temperature_tuning=published)).switches
    assert isinstance(switches, Llama4Switches)
    assert (switches.temperature is not None) == tuned


def test_llama4_may_have_dense_layers_in_between(tmp_path: Path) -> None:
    config = read(tmp_path, text(LLAMA4, interleave_moe_layer_step=2))
    assert config.moe is not None
    assert config.moe.layers == (False, True) * 24


def test_gpt_oss_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS)
    attention, moe = attention_of(config), config.moe
    assert attention.sliding_windows == (128, None) * 12
    assert attention.sinks
    assert attention.qkv_bias
    assert attention.output_bias
    assert config.rope is not None
    assert isinstance(config.rope.scaling, YarnScaling)
    assert not config.rope.scaling.truncate
    assert config.max_context_tokens == 131072
    assert config.switches == GptOssSwitches(7.0, 1.702)
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.router_bias, moe.normalize_weights) == (32, 4, True, True)


def test_gpt_oss_has_yarn_unless_it_says_otherwise(tmp_path: Path) -> None:
    silent = read(tmp_path, {name: value for name, value in GPT_OSS.items() if name != "rope_scaling"})
    assert silent == read(tmp_path, GPT_OSS)


def test_gpt_oss_as_published_has_experts_in_mxfp4(tmp_path: Path) -> None:
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    config = read(tmp_path, GPT_OSS | {"quantization_config": quantization})
    assert config.quantization is not None
    assert config.quantization.covers("model.layers.3.mlp.experts")
    assert not config.quantization.covers("model.layers.3.self_attn.q_proj")
    with pytest.raises(ConfigError, match=r"quant_method mxfp4") as caught:
        read(tmp_path, GPT_OSS | {"quantization_config": {"quant_method": "fp8"}})
    assert caught.value.field == "quantization_config"


def test_falcon_rw_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, FALCON_RW)
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 32, 64)
    assert len(attention.alibi_slopes) == 32
    assert config.rope is None
    assert config.switches == FalconSwitches(parallel=False, num_norms=1)
    assert config.mlp_bias
    assert config.norm_eps == 1e-5
    assert config.intermediate_size == 8192
    assert config.max_context_tokens == 2048
    assert config.tie_word_embeddings


def test_falcon_kv_heads_of_each_generation_are_read(tmp_path: Path) -> None:
    def kv_heads(fields: dict[str, Any]) -> int:
        return attention_of(read(tmp_path, fields)).num_kv_heads

    assert kv_heads(FALCON_40B) == 8
    assert kv_heads(FALCON_RW | {"multi_query": True}) == 1
    assert kv_heads(FALCON_RW | {"multi_query": True, "num_kv_heads": 32}) == 1
    assert read(tmp_path, FALCON_40B).switches == FalconSwitches(parallel=True, num_norms=2)


def test_bloom_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, BLOOM)
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 16, 64)
    assert attention.alibi_slopes == tuple(2.0 ** -((head + 1) / 2) for head in range(16))
    assert config.rope is None
    assert config.switches == BloomSwitches(residual_after_norm=False)
    assert config.max_context_tokens == 2048
    assert config.intermediate_size == 4096
    assert config == read(tmp_path, BLOOM | {"hidden_size": 1024, "n_embed": None})
    assert config == read(tmp_path, BLOOM | {"slow_but_exact": True}), "one slice is the whole product"


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_a_file_that_names_no_dtype_means_that_of_its_weights(tmp_path: Path, stored: torch.dtype) -> None:
    assert read(tmp_path, BLOOM).dtype == "float32"
    tensors = {"word_embeddings.weight": torch.zeros(4, 4, dtype=stored), "ln_f.weight": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read(tmp_path, BLOOM).dtype == str(stored).removeprefix("torch.")
    assert read(tmp_path, BLOOM | {"torch_dtype": "float32"}).dtype == "float32"


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation", "gelu_pytorch_tanh"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "false"),
        (GEMMA2 | {"layer_types": ["full_attention"]}, "layer_types", "46 layers"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "above 0"),
        (text(GEMMA3, attn_logit_softcapping=50.0), "attn_logit_softcapping", "null"),
        (GEMMA3 | {"quantization_config": {"quant_method": "aqlm"}}, "quantization_config", "not supported"),
        (GEMMA2 | {"sliding_window": None}, "sliding_window", "at least 1"),
        (text(GEMMA3, rope_parameters={"full_attention": {}}), "rope_scaling", "keep either"),
        (
            text(GEMMA3, rope_scaling=None, rope_parameters={"rope_type": "linear", "factor": 8.0}),
            "factor",
            "full_attention, sliding_attention",
        ),
        (GEMMA3 | {"text_config": 3}, "text_config", "an object"),
        (GEMMA3 | {"text_config": None}, "text_config", "an object"),
        (text(LLAMA4, no_rope_layers=[1, 2]), "no_rope_layers", "48 layers"),
        (text(LLAMA4, attn_temperature_tuning="on"), "attn_temperature_tuning", "true, false"),
        (text(LLAMA4, num_experts_per_tok=17), "num_experts_per_tok", "num_local_experts, 16"),
        (
            text(LLAMA4, attention_chunk_size=None, layer_types=["chunked_attention"] * 48),
            "attention_chunk_size",
            "chunked_attention",
        ),
        (GPT_OSS | {"num_experts_per_tok": 33}, "num_experts_per_tok", "num_local_experts, 32"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act", "silu"),
        (FALCON_RW | {"activation": "relu"}, "activation", "gelu"),
        (FALCON_RW | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn", "new_decoder_architecture"),
        (FALCON_40B | {"parallel_attn": False}, "parallel_attn", "true"),
        (
            FALCON_RW | {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
            "false",
        ),
        (BLOOM | {"n_head": None}, "num_attention_heads", "missing"),
        (BLOOM | {"pretraining_tp": 4, "slow_but_exact": True}, "slow_but_exact", "leaves biases out"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
