"""Identity: equal for the same weights however stored, different for every change that matters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config.model_config import GQAConfig
from models.config.reader import read_config
from models.identity import config_digest, model_identity
from tests.unit.models.tiny import save_tiny


def weights_digest(directory: Path) -> str:
    return model_identity(directory, read_config(directory)).weights_digest


def test_sharding_does_not_matter(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    save_tiny("llama", one)
    save_tiny("llama", many, max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 1
    first, second = model_identity(one, read_config(one)), model_identity(many, read_config(many))
    assert first.weights_digest == second.weights_digest
    assert first.config_digest == second.config_digest
    assert (first.name, second.name) == ("one", "many")


@pytest.mark.parametrize("change", ["first", "last", "name", "dtype", "shape"])
def test_every_kind_of_change_is_seen(tmp_path: Path, change: str) -> None:
    save_tiny("llama", tmp_path)
    before = weights_digest(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    tensor = tensors.pop(name).clone()
    assert tensor.nbytes > 4096
    match change:
        case "first":
            tensor.view(-1)[0] += 1
        case "last":
            tensor.view(-1)[-1] += 1
        case "name":
            name = "model.embed_token.weight"
        case "dtype":
            tensor = tensor.view(torch.int32)
        case "shape":
            tensor = tensor.T.contiguous()
    save_file(tensors | {name: tensor}, file)
    assert weights_digest(tmp_path) != before


def test_config_digest_sees_every_field(tmp_path: Path) -> None:
    save_tiny("qwen2-window-after-first-layer", tmp_path)
    config = read_config(tmp_path)
    assert isinstance(config.attention, GQAConfig)
    assert config.rope is not None
    changed = [
        replace(config, norm_eps=1e-5),
        replace(config, eos_token_ids=(5,)),
        replace(config, rope=replace(config.rope, theta=7.0)),
        replace(config, attention=replace(config.attention, sliding_windows=(None, None))),
    ]
    assert len({config_digest(each) for each in [config, *changed]}) == 1 + len(changed)


def test_dummy_weights_need_no_files_and_equal_no_checkpoint(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = read_config(tmp_path)
    real = model_identity(tmp_path, config)
    (tmp_path / "model.safetensors").unlink()
    dummy = model_identity(tmp_path, config, load_format="dummy")
    assert dummy.config_digest == real.config_digest
    assert dummy.weights_digest != real.weights_digest
