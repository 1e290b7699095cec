"""Backends of other distributions in batch-invariant mode: one whose rows are not in order is refused when a node
starts."""

from pathlib import Path

import pytest

from baton.core import plugins
from baton.core.errors import ConfigError
from baton.engine.build import build_runner
from baton.settings.node_config import NodeSettings
from tests.unit.baton.test_plugins import install
from tests.unit.models.tiny import save_tiny

CODE = """
from dataclasses import replace

from attention.backends.torch_sdpa import TorchSDPA


class InChunks(TorchSDPA):
    capabilities = replace(TorchSDPA.capabilities, name="IN_CHUNKS", rows_in_order=False)


class InOrder(TorchSDPA):
    capabilities = replace(TorchSDPA.capabilities, name="IN_ORDER")
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "plugins").mkdir()
    monkeypatch.syspath_prepend(folder)
    entries = "IN_CHUNKS = outer_attention:InChunks\nIN_ORDER = outer_attention:InOrder"
    install(folder, "outer-attention", entries, code=CODE, group=plugins.ATTENTION_BACKENDS)
    save_tiny("llama", tmp_path / "model")
    return tmp_path / "model"


def chosen(model: Path, backend: str, *, batch_invariant: bool) -> str:
    settings = NodeSettings(
        model=model, device="cpu", num_blocks=16, attention_backend=backend, batch_invariant=batch_invariant
    )
    name: str = build_runner(settings).runner.backend.capabilities.name
    return name


def test_a_backend_whose_rows_are_not_in_order_serves_no_batch_invariant_node(model: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen(model, "IN_CHUNKS", batch_invariant=True)
    error = refused.value
    assert error.message.startswith("IN_CHUNKS does not serve this model here: ")
    assert "IN_CHUNKS: no rows_in_order: a token's bits depend on how its prompt is cut" in error.message
    assert (error.field, error.value) == ("attention_backend", "IN_CHUNKS")
    assert {"TORCH_SDPA", "IN_ORDER"} <= set(error.allowed)
    assert not {"IN_CHUNKS", "FLASHINFER"} & set(error.allowed)
    assert "--batch-invariant needs a backend with rows_in_order (TORCH_SDPA and TRITON_ATTN)" in error.cure


def test_it_serves_other_nodes(model: Path) -> None:
    assert chosen(model, "IN_CHUNKS", batch_invariant=False) == "IN_CHUNKS"


def test_a_backend_whose_rows_are_in_order_serves_batch_invariant_nodes(model: Path) -> None:
    assert chosen(model, "in_order", batch_invariant=True) == "IN_ORDER"
