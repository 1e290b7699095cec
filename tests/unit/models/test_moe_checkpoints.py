"""Checkpoints with experts in all spellings: as published, and all in one tensor as transformers has them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.loading.expert_names import our_name
from baton.models.loading.loader import load_model
from tests.unit.models import tiny_moe
from tests.unit.models.paged import backend_for
from tests.unit.models.tiny import save_tiny


def load(directory: Path) -> CausalLM:
    config = read_config(directory)
    return load_model(directory, config, backend=backend_for(config), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", tiny_moe.SPELLED)
def test_experts_in_one_tensor_load_like_experts_one_by_one(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "apart")
    save_tiny(name, tmp_path / "together", save_original_format=False)
    names = [set(load_file(tmp_path / each / "model.safetensors")) for each in ("apart", "together")]
    assert names[0] != names[1]
    expected, ours = load(tmp_path / "apart").state_dict(), load(tmp_path / "together").state_dict()
    assert expected.keys() == ours.keys()
    for path, tensor in expected.items():
        assert torch.equal(ours[path], tensor), path


def test_two_tensors_of_one_meaning_are_refused(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    twin = "model.layers.1.mlp.experts.2.w1.weight"
    tensors[twin] = torch.zeros_like(tensors[twin.replace("mlp", "block_sparse_moe")])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 unexpected: model\.layers\.1\.(mlp|block_sparse_moe)\.experts\.2\.w1"):
        load(tmp_path)


def test_experts_of_another_number_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing: model\.layers\.0\.mlp\.experts\.4\.down_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.layers.3.block_sparse_moe.experts.12.w3.weight_scale_inv", "mlp.experts.12.up_proj.weight_scale_inv"),
        ("model.layers.3.block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("model.layers.3.block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("model.layers.3.mlp.moe_statics.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("model.layers.3.mlp.gate.wg.weight", "mlp.gate.weight"),
        ("model.layers.3.mlp.shared_mlp.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "mlp.shared_expert_gate.weight"),
        ("model.layers.3.block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("model.layers.3.block_sparse_moe.router.layer.weight", "mlp.gate.weight"),
        ("model.layers.3.mlp.router.classifier.weight", "mlp.gate.weight"),
        ("model.layers.3.mlp.router.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("model.layers.3.self_attn.q_proj.weight", "self_attn.q_proj.weight"),
    ],
)
def test_every_publishers_spelling_becomes_ours(theirs: str, ours: str) -> None:
    assert our_name(theirs) == f"model.layers.3.{ours}"


def test_the_language_model_of_kimi_k2_5_is_loaded(tmp_path: Path) -> None:
    alone, seeing = tmp_path / "alone", tmp_path / "seeing"
    save_tiny("kimi-k2", alone)
    seeing.mkdir()
    tensors = {f"language_model.{name}": each for name, each in load_file(alone / "model.safetensors").items()}
    others = {"vision_tower.a.weight": torch.zeros(2), "mm_projector.b.weight": torch.zeros(2)}
    save_file(tensors | others, seeing / "model.safetensors")
    text = json.loads((alone / "config.json").read_text())
    nested = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    (seeing / "config.json").write_text(json.dumps(nested))
    expected, ours = load(alone).state_dict(), load(seeing).state_dict()
    assert expected.keys() == ours.keys()
    assert all(torch.equal(ours[path], tensor) for path, tensor in expected.items())
