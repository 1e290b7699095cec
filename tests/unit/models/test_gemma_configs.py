"""config.json of the Gemma families as published, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.rope import ProportionalScaling, RopeConfig
from baton.models.families.dense.gemma3n_config import Gemma3nSwitches
from baton.models.families.dense.gemma4_config import Gemma4Switches
from baton.models.families.dense.gemma_config import NormsBefore
from baton.models.families.reader import read_config
from baton.models.loading.kv_scales import kv_scales
from baton.models.loading.loader import load_model
from baton.models.loading.needs import kv_cache_spec
from tests.unit.models.paged import backend_for
from tests.unit.models.split import run_model
from tests.unit.models.tiny import save_tiny

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

GEMMA3N: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [16384] * 35,
        "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 32768,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
    "torch_dtype": "bfloat16",
}
# With the sizes of the model with 31 billion weights, and of the one with experts.
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
    "dtype": "bfloat16",
}
EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


def text(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return values | {"text_config": values["text_config"] | changes}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def attention_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def test_gemma1_is_read_as_first_published(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA1)
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 1, 256)
    assert attention.scale == 1 / 16
    assert config.tie_word_embeddings
    assert config.switches == NormsBefore("post_attention_layernorm")


def test_gemma3n_caches_only_layers_with_keys_of_their_own(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3N)
    attention, spec = attention_of(config), kv_cache_spec(config, "bfloat16")
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (20, 2, 256)
    assert spec.windows == ((512,) * 4 + (0,)) * 4
    assert [attention.kv_source(index) for index in (0, 19, 20, 24, 34)] == [0, 19, 18, 19, 19]
    assert config.rope == RopeConfig(256, 1e6, interleaved=False, scaling=None)
    assert config.local_rope == RopeConfig(256, 1e4, interleaved=False, scaling=None)
    assert config.switches == Gemma3nSwitches(256, 262144, 4, 0, True, 64, (0.95,) * 10 + (0.0,) * 25)
    assert (config.intermediate_size, config.intermediate_sizes) == (16384, ())
    shortest = {"final_logit_softcapping": 30.0, "model_type": "gemma3n_text"}
    assert read(tmp_path, GEMMA3N | {"text_config": shortest}) == config


def test_gemma4_layers_without_a_window_have_fewer_and_larger_heads(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA4)
    attention, spec = attention_of(config), kv_cache_spec(config, "bfloat16")
    assert attention.layer_heads == (((16, 256),) * 5 + ((4, 512),)) * 10
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (60, 16, 512)
    assert config.rope == RopeConfig(512, 1e6, interleaved=False, scaling=ProportionalScaling(1.0, 64))
    assert config.local_rope == RopeConfig(256, 1e4, interleaved=False, scaling=None)
    assert config.switches == Gemma4Switches(0, 262144, True)
    layers = {str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
    assert read(tmp_path, text(GEMMA4, per_layer_config=layers, num_global_key_value_heads=None)) == config
    assert read(tmp_path, text(GEMMA4, **EXPERTS)).moe is not None


def test_a_gemma_that_also_sees_is_read_without_what_it_sees_with(tmp_path: Path) -> None:
    """Nor the keys and values that layers without them have in published files."""
    save_tiny("gemma3n", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    files = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    extra = ("vision_tower.a", "audio_tower.a", "embed_vision.a", "embed_audio.a")
    files |= {f"model.{name}": torch.ones(3) for name in (*extra, "language_model.layers.4.self_attn.k_proj.weight")}
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    config = read(tmp_path, {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": values})
    model = load_model(tmp_path, config, backend=backend_for(config), dtype="float32", device="cpu")
    assert torch.equal(model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


def test_an_fp8_cache_has_scales_for_layers_with_keys_of_their_own(tmp_path: Path) -> None:
    save_tiny("gemma3n", tmp_path)
    config = read_config(tmp_path)
    exact = run_model(tmp_path)
    fp8 = run_model(tmp_path, kv_dtype="float8_e4m3fn")
    assert cosine_similarity(exact.logits[:5], fp8.logits[:5]).min() > 0.9
    backend = backend_for(config, kv_dtype="float8_e4m3fn")
    model = load_model(tmp_path, config, backend=backend, dtype="float32", device="cpu", kv_dtype="float8_e4m3fn")
    assert len(kv_scales(model)) == 2 * attention_of(config).num_kv_layers


@pytest.mark.parametrize(
    ("values", "field", "allowed"),
    [
        (GEMMA1 | {"hidden_act": "silu"}, "hidden_act", "gelu_pytorch_tanh"),
        (GEMMA1 | {"hidden_activation": "gelu"}, "hidden_activation", "gelu_pytorch_tanh"),
        (GEMMA1 | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "false"),
        (text(GEMMA3N, altup_active_idx=4), "altup_active_idx", "below altup_num_inputs, 4"),
        (text(GEMMA3N, intermediate_size=[16384] * 34), "intermediate_size", "each of 35 layers"),
        (text(GEMMA3N, activation_sparsity_pattern=[1.0] * 35), "activation_sparsity_pattern", "each of 35 layers"),
        (text(GEMMA3N, num_kv_shared_layers=35), "num_kv_shared_layers", "one of each kind"),
        (text(GEMMA3N, num_kv_shared_layers=32), "num_kv_shared_layers", "one of each kind"),
        (text(GEMMA4, use_bidirectional_attention="all"), "use_bidirectional_attention", "vision"),
        (text(GEMMA4, num_global_key_value_heads=3), "num_key_value_heads", "divisor"),
        (text(GEMMA4, per_layer_config={"60": {}}), "60", "layers 0 to 59"),
        (text(GEMMA4, per_layer_config={"6": {"sliding_window": 3}}), "sliding_window", "head_dim"),
        (text(GEMMA4, num_kv_shared_layers=6, per_layer_config={"58": {"head_dim": 64}}), "per_layer_config", "equal"),
        (text(GEMMA4, rope_parameters={"rope_type": "default"}), "rope_type", "full_attention, sliding_attention"),
        (text(GEMMA4, **EXPERTS, use_double_wide_mlp=True), "use_double_wide_mlp", "false"),
        (text(GEMMA4, **EXPERTS | {"top_k_experts": 129}), "top_k_experts", "up to num_experts, 128"),
        (text(GEMMA4, **EXPERTS | {"num_experts": None}), "num_experts", "at least 1"),
        (text(GEMMA4, **EXPERTS, quantization_config={"quant_method": "fp8"}), "quantization_config", "null"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, values: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, values)
    assert error.value.field == field
    assert allowed in str(error.value)
