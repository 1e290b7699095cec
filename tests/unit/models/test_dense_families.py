"""The dense families of Llama's file: config.json as published, what is refused, and Mistral 3's language model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig, ModelConfig, QKNorm
from baton.models.config.rope import AlphaScaling, RopeConfig
from baton.models.families.dense.llama_switches import LlamaSwitches, Norms, QueryGrowth
from baton.models.families.reader import read_config
from baton.models.loading.loader import checkpoint_views, load_model
from tests.unit.models.paged import backend_for
from tests.unit.models.tiny import save_tiny

SHAPE = {
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}
GRANITE = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
HUNYUAN_ROPE = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "type": "dynamic",
}
MINISTRAL3_ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
OLMO3_ROPE = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}


def read(directory: Path, family: str, **fields: Any) -> ModelConfig:
    config = SHAPE | {"architectures": [f"{family}ForCausalLM"]} | fields
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


def attention_of(config: ModelConfig) -> GQAConfig:
    assert isinstance(config.attention, GQAConfig)
    return config.attention


def test_granite_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, "Granite", **GRANITE, logits_scaling=16.0, attention_bias=False, mlp_bias=False)
    assert config.switches == LlamaSwitches(
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_multiplier=0.0625
    )
    assert attention_of(config).scale == 0.0078125


def test_smollm3_is_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, "SmolLM3", no_rope_layers=[1, 1, 1, 0], layer_types=["full_attention"] * 4)
    assert attention_of(config).rotary_layers == (True, True, True, False)
    assert config == read(tmp_path, "SmolLM3", use_sliding_window=False, sliding_window=None)
    assert config.tie_word_embeddings


def test_olmo3_is_read_in_the_older_spelling(tmp_path: Path) -> None:
    config = read(tmp_path, "Olmo3", rope_theta=500000, rope_scaling=OLMO3_ROPE, sliding_window=4096)
    attention = attention_of(config)
    assert attention.sliding_windows == (4096, 4096, 4096, None)
    assert (attention.qk_norm, attention.qk_norm_of) == (True, QKNorm.ROW)
    assert config.local_rope == RopeConfig(128, 500000.0, interleaved=False, scaling=None)
    assert config.rope is not None
    assert config.rope.scaling is not None
    full, sliding = ({"rope_theta": 500000.0} | table for table in (OLMO3_ROPE, {"rope_type": "default"}))
    tables = {"full_attention": full, "sliding_attention": sliding}
    assert config == read(tmp_path, "Olmo3", rope_parameters=tables)


def test_exaone4_turns_heads_in_layers_with_a_window(tmp_path: Path) -> None:
    types = ["sliding_attention"] * 3 + ["full_attention"]
    config = read(tmp_path, "Exaone4", sliding_window=4096, sliding_window_pattern="LLLG", layer_types=types)
    assert attention_of(config).rotary_layers == (True, True, True, False)
    small = read(tmp_path, "Exaone4", sliding_window=None, sliding_window_pattern=None)
    assert attention_of(small).rotary_layers == ()
    assert attention_of(small).sliding_windows == (None,) * 4


def test_hunyuans_alpha_is_that_of_its_rotary_embedding(tmp_path: Path) -> None:
    config = read(tmp_path, "HunYuanDenseV1", head_dim=128, rope_theta=10000.0, rope_scaling=HUNYUAN_ROPE)
    assert config.rope == RopeConfig(128, 10000.0, interleaved=False, scaling=AlphaScaling(1000.0))


def test_mistral_small_and_ministral_3_are_one_architecture(tmp_path: Path) -> None:
    def nested(**fields: Any) -> ModelConfig:
        values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": SHAPE | fields}
        (tmp_path / "config.json").write_text(json.dumps(values | {"vision_config": {"hidden_size": 1024}}))
        return read_config(tmp_path)

    small = nested(model_type="mistral", head_dim=128, rope_theta=1e9, sliding_window=None)
    assert small.switches is None
    assert attention_of(small).sliding_windows == (None,) * 4
    ministral = nested(model_type="ministral3", rope_parameters=MINISTRAL3_ROPE)
    assert ministral.switches == LlamaSwitches(query_growth=QueryGrowth(0.1, 16384))
    assert ministral.max_context_tokens == 262144
    assert nested(model_type="ministral3") == ministral


def test_cohere_and_cohere2_are_read_as_published(tmp_path: Path) -> None:
    config = read(tmp_path, "Cohere", logit_scale=0.0625, layer_norm_eps=1e-6, use_qk_norm=True, rope_theta=8e6)
    assert config.switches == LlamaSwitches(norms=Norms.SHARED, logits_multiplier=0.0625)
    assert config.norm_eps == 1e-6
    assert attention_of(config).qk_norm_of is QKNorm.OWN_WEIGHTS
    second = attention_of(read(tmp_path, "Cohere2", logit_scale=0.25, layer_switch=4, use_parallel_block=True))
    assert second.sliding_windows == (4096, 4096, 4096, None)
    assert second.rotary_layers == (True, True, True, False)


def test_half_of_each_of_glms_heads_turns(tmp_path: Path) -> None:
    config = read(tmp_path, "Glm4", head_dim=128, attention_bias=False)
    assert config.rope == RopeConfig(64, 10000.0, interleaved=True, scaling=None)
    assert read(tmp_path, "Glm4", attention_bias=False, partial_rotary_factor=0.5) == config


@pytest.mark.parametrize(
    ("family", "fields", "field"),
    [
        ("SmolLM3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("SmolLM3", {"no_rope_layers": [1, 1, 2, 0]}, "no_rope_layers"),
        ("SmolLM3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ("Olmo3", {"rope_parameters": {"rope_theta": 3.0}}, "rope_theta"),
        ("Exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ("HunYuanDenseV1", {"use_cla": True}, "use_cla"),
        ("Ministral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ("Cohere2", {"use_parallel_block": False}, "use_parallel_block"),
        ("Apertus", {"hidden_act": "silu"}, "hidden_act"),
        ("Apertus", {"post_norm": True}, "post_norm"),
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, family: str, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, family, **fields)
    assert caught.value.field == field


def test_the_language_model_of_mistral_3(tmp_path: Path) -> None:
    save_tiny("ministral3", tmp_path)
    config = read_config(tmp_path)
    model = load_model(tmp_path, config, backend=backend_for(config), dtype="float32", device="cpu")
    seeing, tensors = tmp_path / "seeing", load_file(tmp_path / "model.safetensors")
    seeing.mkdir()
    others = {"vision_tower.a.weight": torch.zeros(2), "multi_modal_projector.norm.weight": torch.zeros(2)}
    save_file({f"language_model.{name}": each for name, each in tensors.items()} | others, seeing / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (seeing / "config.json").write_text(json.dumps(values))
    config = read_config(seeing)
    loaded = load_model(seeing, config, backend=backend_for(config), dtype="float32", device="cpu")
    expected = checkpoint_views(model)
    assert all(torch.equal(view, expected[name]) for name, view in checkpoint_views(loaded).items())
