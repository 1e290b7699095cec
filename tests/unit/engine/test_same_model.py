"""Ranks whose hosts have different copies of the model are refused: a sum over parts of two models fits neither."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.engine.build import build_runner
from baton.models.layers.parallel import TensorParallel
from baton.settings.node_config import NodeSettings
from tests.damaged_weights import zero
from tests.ranks import run_ranks
from tests.unit.models.tiny import save_tiny


def load_parts(rank: TensorParallel, hosts: list[tuple[Path, Path]]) -> list[str]:
    """What a rank says that loads its part from its host's directory, each of these times."""
    errors = []
    for models in hosts:
        settings = NodeSettings(
            model=models[rank.rank], device="cpu", num_blocks=4, tensor_parallel_size=2, num_hosts=2
        )
        try:
            build_runner(settings, parallel=rank)
            errors.append("")
        except ConfigError as error:
            errors.append(error.message.partition(";")[0])
    return errors


def content_digest(rank: TensorParallel, model: Path, hosts: int) -> str:
    settings = NodeSettings(model=model, device="cpu", num_blocks=4, tensor_parallel_size=2, num_hosts=hosts)
    return build_runner(settings, parallel=rank).identity.content_digest


def retrained(model: Path) -> None:
    file = model / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def damaged(model: Path) -> None:
    zero(model, num_bytes=64)


def with_another_norm(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))


def with_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def test_all_ranks_have_the_same_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny("llama-llama3-tied", model)
    hosts = [(model, model)]
    for change in (retrained, damaged, with_another_norm, with_a_tokenizer):
        other = tmp_path / change.__name__
        shutil.copytree(model, other)
        change(other)
        hosts.append((model, other))
    (tmp_path / "ranks").mkdir()
    expected = [
        "",
        "the ranks have models with different weights",
        "the ranks have models with different bytes of the weights",
        "the ranks have models with different configurations",
        "the ranks have models with different tokenizers",
    ]
    assert run_ranks(load_parts, 2, tmp_path / "ranks", hosts) == [expected] * 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_all_ranks_know_the_digest_of_the_weights(tmp_path: Path, hosts: int) -> None:
    """Their files of KV are named by it."""
    model = tmp_path / "model"
    save_tiny("llama-llama3-tied", model)
    alone = build_runner(NodeSettings(model=model, device="cpu", num_blocks=4)).identity.content_digest
    assert alone
    (tmp_path / "ranks").mkdir()
    assert run_ranks(content_digest, 2, tmp_path / "ranks", model, hosts) == [alone] * 2
