"""Which nodes load the layer that drafts tokens, and what the log says where a checkpoint's is left out."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.engine import build as building
from baton.engine.build import build_runner
from baton.engine.draft_layer import with_draft_layer
from baton.models.config.model_config import ModelConfig
from baton.models.config.mtp import with_mtp
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import TensorParallel
from baton.models.loading import loader as loading
from baton.settings.config import MIB
from baton.settings.node_config import NodeSettings
from tests.ranks import run_ranks
from tests.unit.models.tiny import save_tiny
from tests.unit.models.tiny_mtp import save_with_mtp


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp")
    save_with_mtp("deepseek-v3", directory)
    return directory


def settings(directory: Path, **given: Any) -> NodeSettings:
    return NodeSettings.model_validate({"model": directory, "device": "cpu"} | given)


def drafts(directory: Path, speculation: str) -> bool:
    return with_draft_layer(read_config(directory), settings(directory, speculation=speculation)).drafts


@pytest.mark.parametrize(("speculation", "wanted"), [("off", False), ("text", False), ("auto", True), ("always", True)])
def test_a_node_that_drafts_loads_it(model: Path, speculation: str, wanted: bool) -> None:
    assert drafts(model, speculation) is wanted
    built = build_runner(settings(model, speculation=speculation, num_blocks=8))
    assert (built.runner.model.mtp is not None, built.runner.facts.drafts) == (wanted, wanted)
    assert (built.cache.draft is not None, built.model_spec.draft is not None) == (wanted, wanted)


def test_blocks_with_the_layers_kv_are_others_than_those_without(model: Path) -> None:
    plain, drafting = (
        build_runner(settings(model, speculation=speculation, num_blocks=8)) for speculation in ("off", "auto")
    )
    assert plain.identity == drafting.identity
    assert plain.runner.facts.identity != drafting.runner.facts.identity


def test_files_without_the_layer_are_served_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers drops the layer and keeps the config's number of such layers."""
    save_tiny("deepseek-v3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    with caplog.at_level(logging.INFO):
        build_runner(settings(tmp_path, num_blocks=8))
    (left_out,) = left_out_lines(caplog)
    assert "the files have no tensors of it" in left_out


def without_tensors(model: Path, directory: Path, kept: Callable[[str], bool]) -> None:
    shutil.copytree(model, directory, dirs_exist_ok=True)
    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if kept(name)}
    save_file(tensors, path, metadata={"format": "pt"})


def left_out_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of a layer that is not used."""
    return [line for line in caplog.messages if "multi-token prediction is not used" in line]


@pytest.mark.parametrize("speculation", ["auto", "always"])
@pytest.mark.parametrize("lost", ["enorm.", "eh_proj.", "self_attn.o_proj.", "mlp.experts.1.", "input_layernorm."])
def test_a_layer_that_the_files_have_in_part_is_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str, speculation: str
) -> None:
    without_tensors(model, tmp_path, lambda name: not name.startswith(f"model.layers.2.{lost}"))
    with caplog.at_level(logging.INFO):
        built = build_runner(settings(tmp_path, speculation=speculation, num_blocks=8))
    (left_out,) = left_out_lines(caplog)
    assert f"model.layers.2.{lost}" in left_out
    assert not built.runner.facts.drafts
    assert built.model_spec.draft is None


def test_a_layer_in_another_form_than_the_models_is_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a checkpoint that was quantized without its layer, or with it alone."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    name, tensors = "model.layers.2.self_attn.o_proj.weight", load_file(path)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        built = build_runner(settings(tmp_path, num_blocks=8))
    (left_out,) = left_out_lines(caplog)
    assert name in left_out
    assert not built.runner.facts.drafts


def test_damage_outside_of_the_layer_is_refused_as_without_it(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_tensors(model, tmp_path, lambda name: name != "model.norm.weight")
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=r"1 missing: model\.norm\.weight"):
        build_runner(settings(tmp_path, num_blocks=8))
    assert not left_out_lines(caplog)


def test_a_layer_that_takes_the_longest_requests_room_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache's size in MiB is given, so a token that takes more leaves fewer of them."""
    save_with_mtp("deepseek-v3", tmp_path, changed={"max_position_embeddings": MIB})
    without, with_layer = (build_runner(settings(tmp_path, speculation=each, num_blocks=8)) for each in ("off", "auto"))
    token = without.model_spec.bytes_per_token
    assert with_layer.model_spec.bytes_per_token == token * 3 // 2
    fitting = MIB // token
    with caplog.at_level(logging.INFO):
        kept = build_runner(settings(tmp_path, kv_cache_mib=1, max_context_tokens=fitting * 2 // 3 - 64))
        assert kept.runner.facts.drafts
        assert not left_out_lines(caplog)
        built = build_runner(settings(tmp_path, kv_cache_mib=1, max_context_tokens=fitting - 64))
    (left_out,) = left_out_lines(caplog)
    assert f"the {fitting - 64} tokens of the longest request" in left_out
    assert not built.runner.facts.drafts
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert build_runner(settings(tmp_path, kv_cache_mib=1, max_context_tokens=fitting + 64)).runner.facts.drafts
    assert not left_out_lines(caplog), "the longest request has no room without it either"


def left_out_of_ranks(parallel: TensorParallel, directory: Path) -> tuple[bool, int]:
    """Whether a rank drafts, if the last rank alone has no memory for the layer's weights; and its blocks."""
    load = loading.load_model

    def scarce(directory: Path, config: ModelConfig, **given: Any) -> CausalLM:
        if config.drafts and parallel.rank:
            raise MemoryError
        return load(directory, config, **given)

    with mock.patch.object(building, "load_model", scarce):
        built = build_runner(settings(directory, tensor_parallel_size=2, kv_cache_mib=1), parallel=parallel)
    return built.runner.facts.drafts, built.cache.shape.num_blocks


def test_ranks_leave_the_layer_out_together(model: Path, tmp_path: Path) -> None:
    one, other = run_ranks(left_out_of_ranks, 2, tmp_path, model)
    assert one == other
    assert one[0] is False


@pytest.mark.parametrize("architecture", ["DeepseekV3Model", "DeepseekV3ForSequenceClassification"])
def test_a_model_that_generates_nothing_has_no_use_for_it(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str
) -> None:
    without_tensors(model, tmp_path, lambda name: name != "lm_head.weight")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text()) | {"architectures": [architecture], "id2label": {"0": "only"}}
    path.write_text(json.dumps(fields))
    if architecture.endswith("Classification"):
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["score.weight"] = torch.ones(1, fields["hidden_size"])
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        built = build_runner(settings(tmp_path, num_blocks=8))
    assert built.runner.model.mtp is None
    assert not left_out_lines(caplog)
    config = read_config(tmp_path)
    assert with_mtp(config) is config


def test_a_model_without_such_a_layer_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny("llama-llama3-tied", tmp_path)
    config = read_config(tmp_path)
    with caplog.at_level(logging.INFO):
        built = build_runner(settings(tmp_path, num_blocks=8))
    assert not left_out_lines(caplog)
    assert built.model_spec == build_runner(settings(tmp_path, num_blocks=8, speculation="off")).model_spec
    assert config == replace(config, drafts=False)


@pytest.mark.parametrize(("speculation", "has_layer"), [("auto", False), ("always", True)])
def test_attention_data_parallelism_leaves_the_layer_out_by_default(
    speculation: str, has_layer: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_mtp("deepseek-v3", tmp_path)
    flags: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel": True, "attention_data_parallel": True}
    settings = NodeSettings(model=tmp_path, device="cpu", **flags).model_copy(update={"speculation": speculation})
    with caplog.at_level(logging.INFO):
        config = with_draft_layer(read_config(tmp_path), settings, logs=True)
    assert config.drafts == has_layer
    assert ("--speculation always uses it" in caplog.text) == (not has_layer)
