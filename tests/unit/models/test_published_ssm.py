"""config.json of models with layers of Mamba-2 as publishers write it, what a request keeps, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, ModelConfig, Scoring
from baton.models.families.hybrid.falcon_h1_config import FalconH1Switches
from baton.models.families.hybrid.mamba_config import MambaSwitches
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import kv_cache_spec
from baton.planner.model_size import model_size

GRANITE_4_SMALL: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)],
    "logits_scaling": 16,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "shared_intermediate_size": 1536,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
NEMOTRON_H_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 3,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, math.inf],
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
BAMBA_9B: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "attention_bias": False,
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
FALCON_H1_DEEP: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.6640625,
    "attn_layer_indices": None,
    "embedding_multiplier": 22.627416997969522,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3840,
    "key_multiplier": 0.0625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_multipliers": [0.5, 0.1875],
    "model_type": "falcon_h1",
    "num_attention_heads": 6,
    "num_hidden_layers": 66,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.25, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.2357022603955158,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 65537,
}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def switches_of(config: ModelConfig) -> MambaSwitches:
    assert isinstance(config.switches, MambaSwitches)
    return config.switches


def test_granite_4_small_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE_4_SMALL)
    assert config.rope is None
    assert isinstance(config.attention, GQAConfig)
    assert config.attention.scale == 0.0078125
    assert (switches_of(config).head_dim, switches_of(config).state_size) == (64, 128)
    assert switches_of(config).logits_multiplier == 1 / 16
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.shared_intermediate_size) == (72, 1536)
    spec = kv_cache_spec(config, "bfloat16")
    assert spec.state is not None
    assert (spec.num_layers, spec.state.num_layers, spec.state.num_kv_heads) == (4, 36, 128)
    assert spec.state.head_dim == 64 * 128 + (64 + 2 * 128) * 3
    assert [config.cache_layer(index) for index in (0, 4, 5, 6, 15)] == [0, 4, 0, 5, 1]


def test_nemotron_h_8b_has_layers_that_keep_nothing(tmp_path: Path) -> None:
    config = read(tmp_path, NEMOTRON_H_8B)
    recurrent = config.recurrent
    assert recurrent is not None
    assert (config.num_layers, recurrent.num_layers, sum(recurrent.kv_layers)) == (52, 24, 4)
    assert config.moe is None
    spec = kv_cache_spec(config, "bfloat16")
    assert spec.state is not None
    assert (spec.num_layers, spec.state.num_layers) == (4, 24)
    assert [config.cache_layer(index) for index in (0, 2, 6, 7, 9, 18)] == [0, 1, 3, 0, 4, 1]
    assert switches_of(config).dt_min == 0.001


def test_bamba_9b_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, BAMBA_9B)
    assert config.rope is not None
    assert config.rope.dim == 64
    spec = kv_cache_spec(config, "bfloat16")
    assert spec.state is not None
    assert (spec.num_layers, spec.state.num_layers) == (3, 29)


def test_falcon_h1_keeps_a_state_and_kv_in_every_layer(tmp_path: Path) -> None:
    config = read(tmp_path, FALCON_H1_DEEP)
    switches = config.switches
    assert isinstance(switches, FalconH1Switches)
    assert isinstance(config.attention, GQAConfig)
    assert (switches.head_dim, switches.state_size, switches.gated_norm) == (64, 256, False)
    assert config.attention.scale == 128**-0.5 * 0.0625
    spec = kv_cache_spec(config, "bfloat16")
    assert spec.state is not None
    assert (spec.num_layers, spec.state.num_layers, spec.state.num_kv_heads) == (66, 66, 24)
    assert {(config.cache_layer(index), config.kv_layer(index)) for index in (0, 65)} == {(0, 0), (65, 65)}
    assert model_size(config).kv_bytes == 66 * 2 * 2 * 128 * 2


@pytest.mark.parametrize(("size", "groups", "ranks_per_group"), [(2, 4, 1), (8, 1, 1), (16, 1, 2)])
def test_ranks_that_share_a_group(tmp_path: Path, size: int, groups: int, ranks_per_group: int) -> None:
    config = read(tmp_path, NEMOTRON_H_8B)
    for rank in range(size):
        own = local_config(config, TensorParallel(rank, size)).recurrent
        assert own is not None
        assert (own.num_heads, own.num_groups, own.ranks_per_group) == (128 // size, groups, ranks_per_group)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (GRANITE_4_SMALL | {"mamba_d_head": 32}, "mamba_d_head"),
        (GRANITE_4_SMALL | {"mamba_n_groups": 3}, "mamba_n_groups"),
        (GRANITE_4_SMALL | {"layer_types": ["mamba"] * 40}, "layer_types"),
        (GRANITE_4_SMALL | {"layer_types": ["conv"] * 40}, "layer_types"),
        (GRANITE_4_SMALL | {"time_step_limit": [0]}, "time_step_limit"),
        (GRANITE_4_SMALL | {"mamba_d_conv": 1}, "mamba_d_conv"),
        (BAMBA_9B | {"attn_layer_indices": []}, "attn_layer_indices"),
        (FALCON_H1_DEEP | {"projectors_bias": True}, "projectors_bias"),
        (FALCON_H1_DEEP | {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        (FALCON_H1_DEEP | {"mamba_use_mlp": False}, "mamba_use_mlp"),
        (FALCON_H1_DEEP | {"attn_layer_indices": [3]}, "attn_layer_indices"),
        (FALCON_H1_DEEP | {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
        (FALCON_H1_DEEP | {"mlp_multipliers": [1.0] * 3}, "mlp_multipliers"),
        (FALCON_H1_DEEP | {"mamba_d_ssm": 1024}, "mamba_d_head"),
        (NEMOTRON_H_8B | {"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern"),
        (NEMOTRON_H_8B | {"hybrid_override_pattern": "M-M-"}, "layers_block_type"),
        (NEMOTRON_H_8B | {"n_groups": 3}, "n_groups"),
        (NEMOTRON_H_8B | {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (NEMOTRON_H_8B | {"hybrid_override_pattern": None}, "layers_block_type"),
        (NEMOTRON_H_8B | {"hybrid_override_pattern": "M*E", "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, values)
    assert caught.value.field == problem


def test_ranks_do_not_cut_blocks_of_fp8(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = read(tmp_path, GRANITE_4_SMALL | {"quantization_config": fp8})
    with pytest.raises(ConfigError, match="stored together") as caught:
        local_config(config, TensorParallel(0, 2))
    assert caught.value.allowed == ("1",)


def test_experts_of_nemotron_are_chosen_by_sigmoids(tmp_path: Path) -> None:
    moe = read(tmp_path, NEMOTRON_H_8B | {"hybrid_override_pattern": "M*E-", "n_routed_experts": 16}).moe
    assert moe is not None
    assert moe.layers == (False, False, True, False)
    assert (moe.scoring, moe.num_experts) == (Scoring.SIGMOID, 16)
