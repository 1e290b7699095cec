"""Which nodes load the layer that drafts tokens, and what the log says where a checkpoint's is left out."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import build_runner
from baton.engine.draft_layer import with_draft_layer
from baton.models.families.reader import read_config
from baton.settings.node_config import NodeSettings
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
def test_a_node_that_guesses_loads_it(model: Path, speculation: str, wanted: bool) -> None:
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
    with caplog.at_level(logging.WARNING):
        assert not drafts(tmp_path, "auto")
    assert "the files have no tensors of it" in caplog.text
    build_runner(settings(tmp_path, speculation="auto", num_blocks=8))


def test_a_model_without_such_a_layer_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny("llama-llama3-tied", tmp_path)
    config = read_config(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not drafts(tmp_path, "auto")
    assert not caplog.records
    assert config == replace(config, drafts=False)
