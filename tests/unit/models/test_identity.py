"""Identity: equal for the same weights however stored, different for every change that matters."""

from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.blocksparse import BlocksparseParams
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.config.quantization.config import Fp8Config, Granularity
from baton.models.config.rope import RopeConfig, YarnScaling
from baton.models.families.moe.llama4_config import Llama4Switches, TemperatureTuning
from baton.models.families.reader import read_config
from baton.models.loading.identity import config_digest, model_identity
from tests.unit.models.tiny import save_tiny

# With a value in every kind of part.
FULL = ModelConfig(
    architecture="Llama4",
    vocab_size=512,
    hidden_size=128,
    num_layers=2,
    intermediate_size=256,
    mlp_bias=False,
    norm_eps=1e-5,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
    dtype="bfloat16",
    eos_token_ids=(2,),
    attention=GQAConfig(
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        qkv_bias=True,
        output_bias=False,
        qk_norm=True,
        sliding_windows=(None, 64),
        scale=0.25,
        sinks=True,
        blocksparse=(None, BlocksparseParams(1024, 8, 2, 64, 16, 8)),
    ),
    rope=RopeConfig(16, 1e4, False, YarnScaling(4.0, 2048, 32.0, 1.0, True, None, 0.0, 0.0)),
    moe=MoEConfig((False, True), 8, 2, 32, 0, Scoring.SOFTMAX, TopKMethod.GREEDY, 1, 1, True, 1.0),
    quantization=Fp8Config(Granularity.BLOCK, True, unquantized=("lm_head",)),
    switches=Llama4Switches((True, False), True, TemperatureTuning(8192, 0.1)),
)
PLAIN = replace(
    FULL,
    architecture="DeepseekV2",
    attention=MLAConfig(4, None, 24, 12, 8, 10),
    rope=None,
    moe=None,
    quantization=None,
    switches=None,
)


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


def of_a_later_release(part: Any, default: object, **added: object) -> Any:
    """The same values in the part's class as a later release has it, with one more field."""
    cls = type(part)
    later = make_dataclass(cls.__name__, [("added", object, field(default=default))], bases=(cls,), frozen=True)
    return later(**{each.name: getattr(part, each.name) for each in fields(part)}, **added)


@pytest.mark.parametrize("default", [False, None, (), 0.5])
def test_a_field_that_a_later_release_adds_leaves_the_digest_of_models_without_it(default: object) -> None:
    for config in (FULL, PLAIN):
        assert config_digest(of_a_later_release(config, default)) == config_digest(config)
        assert config_digest(of_a_later_release(config, default, added=7)) != config_digest(config)
    for name in ("attention", "rope", "moe", "quantization", "switches"):
        later = of_a_later_release(getattr(FULL, name), default)
        assert config_digest(replace(FULL, **{name: later})) == config_digest(FULL)
        used = replace(FULL, **{name: replace(later, added=7)})
        assert config_digest(used) != config_digest(FULL)


def test_digests_are_those_of_the_first_release() -> None:
    """Computed with its code. Nodes of other digests would not pair with its nodes, though their weights are equal."""
    digests = [config_digest(config)[:16] for config in (FULL, PLAIN)]
    assert digests == ["a375b6cf94b72d9f", "af83328131ce2638"]


def test_dummy_weights_need_no_files_and_equal_no_checkpoint(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = read_config(tmp_path)
    real = model_identity(tmp_path, config)
    (tmp_path / "model.safetensors").unlink()
    dummy = model_identity(tmp_path, config, load_format="dummy")
    assert dummy.config_digest == real.config_digest
    assert dummy.weights_digest != real.weights_digest
