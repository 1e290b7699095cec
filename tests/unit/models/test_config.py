"""config.json of every supported family, in every spelling of published checkpoints, and refusals."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.models.config.fields import Fields
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, MLAConfig, TopKMethod
from baton.models.config.rope import Llama3Scaling, YarnScaling
from baton.models.families.reader import read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 3}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
V3: dict[str, Any] = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
V2 = V3 | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy"}


def write(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def attention_of(directory: Path, config: dict[str, Any]) -> GQAConfig:
    attention = read_config(write(directory, config)).attention
    assert isinstance(attention, GQAConfig)
    return attention


def test_older_and_newer_spellings_give_equal_configs(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    older = LLAMA | {
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "llama3", "rope_type": "llama3"} | scaling,
    }
    newer = LLAMA | {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3"} | scaling,
    }
    config = read_config(write(tmp_path, older))
    assert read_config(write(tmp_path, newer)) == config
    assert config.dtype == "bfloat16"
    assert config.rope is not None
    assert config.rope.theta == 500000.0
    assert config.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 512)


def test_original_context_defaults_to_the_maximum(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0}
    config = read_config(write(tmp_path, LLAMA | {"rope_scaling": rope}))
    assert config.rope is not None
    assert isinstance(config.rope.scaling, YarnScaling)
    assert config.rope.scaling.original_max_position_embeddings == 2048


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_original_context_next_to_the_table_counts(tmp_path: Path, spelling: str) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    inside = read_config(write(tmp_path, LLAMA | {spelling: rope | {"original_max_position_embeddings": 512}}))
    outside = read_config(write(tmp_path, LLAMA | {spelling: rope, "original_max_position_embeddings": 512}))
    assert outside == inside
    unstretched = LLAMA | {"original_max_position_embeddings": 512}
    assert read_config(write(tmp_path, unstretched)) == read_config(write(tmp_path, LLAMA))


def test_context_is_the_maximum_position(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, LLAMA)).max_context_tokens == 2048


def test_context_with_yarn_is_the_stretched_one(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert read_config(write(tmp_path, LLAMA | {"rope_scaling": rope})).max_context_tokens == 8192


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 3]}, None, (2, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": 2}, {"temperature": 0.6}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_eos_comes_from_generation_config_then_config(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read_config(write(tmp_path, LLAMA | config, generation)).eos_token_ids == expected


def test_head_dim_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert attention_of(tmp_path, LLAMA).head_dim == 16
    assert attention_of(tmp_path, LLAMA | {"head_dim": 32}).head_dim == 32


def test_biases_and_norms_of_each_family_are_read(tmp_path: Path) -> None:
    def switches(architecture: str, **fields: Any) -> tuple[bool, bool, bool]:
        attention = attention_of(tmp_path, LLAMA | {"architectures": [architecture]} | fields)
        return attention.qkv_bias, attention.output_bias, attention.qk_norm

    assert switches("LlamaForCausalLM") == (False, False, False)
    assert switches("LlamaForCausalLM", attention_bias=True) == (True, True, False)
    assert switches("MistralForCausalLM") == (False, False, False)
    assert switches("Qwen2ForCausalLM") == (True, False, False)
    assert switches("Qwen3ForCausalLM") == (False, False, True)
    assert switches("Qwen3ForCausalLM", attention_bias=True) == (True, True, True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (None,) * 4),
        (MISTRAL, (16,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        ({name: value for name, value in MISTRAL.items() if name != "sliding_window"}, (4096,) * 4),
        (QWEN2, (None,) * 4),
        (QWEN2 | {"use_sliding_window": True}, (None, None, None, 32)),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, (32,) * 4),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 32, None, 32),
        ),
    ],
)
def test_sliding_windows_are_read(tmp_path: Path, config: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert attention_of(tmp_path, config).sliding_windows == expected


def test_deepseek_v3_is_read_as_published(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, V3))
    assert config.attention == MLAConfig(4, 8, 16, 8, 4, 8)
    assert config.rope is not None
    assert config.rope.dim == 4
    assert config.rope.interleaved
    assert config.mtp_layers == 1
    assert config.moe is not None
    assert config.moe.layers == (False, True, True, True)
    assert config.moe.method is TopKMethod.NOAUX_TC
    assert config.moe.normalize_weights
    assert config.moe.weight_scale == 2.5


def test_deepseek_v2_is_read_without_query_latent_and_with_greedy_routing(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, V2 | {"q_lora_rank": None, "topk_method": "greedy", "moe_layer_freq": 1}))
    assert isinstance(config.attention, MLAConfig)
    assert config.attention.q_lora_rank is None
    assert config.moe is not None
    assert config.moe.layers == (False, True, True, True)
    assert config.moe.num_groups == 1
    assert config.moe.weight_scale == 1.0


def test_deepseek_without_experts_is_dense(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, V3 | {"n_routed_experts": None})).moe is None


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (LLAMA | {"architectures": ["ArceeForCausalLM"], "hidden_act": "silu"}, "hidden_act", "relu2"),
        (LLAMA | {"architectures": ["HeliumForCausalLM"]}, "architectures", "LlamaForCausalLM"),
        (LLAMA | {"architectures": []}, "architectures", "DeepseekV3ForCausalLM"),
        (LLAMA | {"architectures": None}, "architectures", "missing"),
        (V2 | {"moe_layer_freq": 2}, "moe_layer_freq", "allowed: 1"),
        (LLAMA | {"vocab_size": None}, "vocab_size", "missing"),
        (LLAMA | {"vocab_size": "100"}, "vocab_size", "'100'"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers", "from 1 to"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers", "True"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads", "divisor"),
        (LLAMA | {"hidden_size": 66}, "head_dim", "multiple"),
        (LLAMA | {"head_dim": 7}, "head_dim", "even"),
        (LLAMA | {"rms_norm_eps": 0}, "rms_norm_eps", "above 0"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps", "a number"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings", "true, false"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act", "silu"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "torch_dtype", "bfloat16"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id", "list of integers"),
        (LLAMA | {"quantization_config": {"quant_method": "quip"}}, "quantization_config", "not supported"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "1.0"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "not supported"),
        (LLAMA | {"sliding_window": 8}, "sliding_window", "all tokens"),
        (LLAMA | {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "type", "llama3"),
        (LLAMA | {"rope_scaling": {"rope_type": "proportional"}}, "rope_type", "yarn"),
        (LLAMA | {"rope_scaling": [1]}, "rope_scaling", "object"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor", "missing"),
        (LLAMA | {"rope_scaling": {"rope_type": "default", "beta_fast": 2}}, "beta_fast", "known fields are"),
        (LLAMA | {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "1.0"),
        (LLAMA | {"rope_scaling": YARN | {"beta_fast": 1e9}}, "beta_fast", "1e-06 to 1e+06"),
        (LLAMA | {"rope_scaling": YARN | {"factor": 1e20}}, "factor", "2147483647 tokens"),
        (LLAMA | {"rope_scaling": YARN | {"beta_slow": 1e-20}}, "beta_slow", "1e-06 to 1e+06"),
        (LLAMA | {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling", "keep either"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3}},
            "high_freq_factor",
            "at least low_freq_factor",
        ),
        (MISTRAL | {"layer_types": ["full_attention"] * 4}, "layer_types", "sliding_attention for every"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types", "4 layers"),
        (QWEN2 | {"layer_types": "full_attention"}, "layer_types", "list of strings"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window", "true"),
        (QWEN2 | {"use_mrope": True}, "use_mrope", "not supported"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob", "false"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method", "group_limited_greedy"),
        (V2 | {"scoring_func": "sigmoid"}, "scoring_func", "softmax"),
        (V2 | {"attention_bias": True}, "attention_bias", "false"),
        (V3 | {"topk_method": "greedy"}, "topk_method", "noaux_tc"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func", "sigmoid"),
        (V3 | {"n_group": 3}, "n_group", "divisor"),
        (V3 | {"n_group": 8}, "n_group", "into 2 or more"),
        (V3 | {"topk_group": 5}, "topk_group", "n_group"),
        (V3 | {"num_experts_per_tok": 5}, "num_experts_per_tok", "topk_group"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, config))
    assert caught.value.field == field
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON.*download"), ("[]", "is not a JSON object.*download")]
)
def test_damaged_config_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def declared(fields_class: type[Fields]) -> Iterator[tuple[type[Fields], str]]:
    """(Class, field) of every field that any reader declares with a type."""
    for name, field in fields_class.model_fields.items():
        if field.annotation is not object:
            yield fields_class, name
    for subclass in fields_class.__subclasses__():
        yield from declared(subclass)


def test_the_error_of_every_declared_field_has_its_allowed_values() -> None:
    fields = list(declared(Fields))
    assert len(fields) > 200
    for fields_class, name in fields:
        refused = fields_class.refuse_value(ConfigFile("config.json", {}), name)
        assert refused.field == name
        assert all(refused.allowed), (fields_class, name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 10**9),
        ("vocab_size", 2**20),
        ("hidden_size", 2**40),
        ("max_position_embeddings", 10**30),
    ],
)
def test_numbers_that_no_model_has_are_refused_at_once(tmp_path: Path, field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 1.*allowed: an integer from [12] to ") as caught:
        read_config(write(tmp_path, LLAMA | {field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize("value", [0, 1])
def test_a_context_without_room_for_a_prompt_and_an_output_is_refused(tmp_path: Path, value: int) -> None:
    with pytest.raises(
        ConfigError, match=f"max_position_embeddings is {value}; allowed: an integer from 2 to"
    ) as caught:
        read_config(write(tmp_path, LLAMA | {"max_position_embeddings": value}))
    assert caught.value.field == "max_position_embeddings"
    assert "the model's longest sequence in tokens" in caught.value.cure


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 7}])
@pytest.mark.parametrize("value", ["x", [1, "x"], 1.5, True, -1, {"id": 1}])
def test_an_end_of_text_that_is_no_token_id_is_refused(
    tmp_path: Path, value: object, generation: dict[str, Any] | None
) -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id is .*allowed: an integer, a list of integers"):
        read_config(write(tmp_path, LLAMA | {"eos_token_id": value}, generation))


def test_a_file_nested_without_end_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        read_config(tmp_path)


def test_a_value_nested_deeply_or_long_is_shown_in_short(tmp_path: Path) -> None:
    deep: Any = "x" * 1_000_000
    for _ in range(200):
        deep = [deep]
    for value in (deep, "x" * 1_000_000, [1] * 1_000_000):
        with pytest.raises(ConfigError, match="hidden_size is ") as caught:
            read_config(write(tmp_path, LLAMA | {"hidden_size": value}))
        assert len(str(caught.value)) < 600


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: it is not a regular file"):
        read_config(tmp_path)
