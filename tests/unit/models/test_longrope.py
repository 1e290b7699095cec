"""LongRoPE: the context that a node serves chooses the factors, for all tokens of all requests."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.models.config.model_config import ModelConfig
from baton.models.config.rope import LongRopeScaling
from baton.models.families.reader import read_config
from baton.models.loading.identity import config_digest
from baton.models.loading.loader import load_model
from tests.unit.models import tiny, tiny_rope
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.tiny import save_tiny

NAME, ORIGINAL = "phi3-longrope-partial", 16


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    family, fields = tiny_rope.MODELS[NAME]
    changed = {NAME: (family, fields | {"original_max_position_embeddings": ORIGINAL})}
    monkeypatch.setattr(tiny, "TINY", {**tiny.TINY, **changed})
    return tmp_path


def is_long(config: ModelConfig) -> bool:
    assert config.rope is not None
    assert isinstance(config.rope.scaling, LongRopeScaling)
    return config.rope.scaling.long


@torch.inference_mode()
def test_with_long_factors_sequences_past_the_original_context_equal_transformers_in_any_chunks(
    directory: Path,
) -> None:
    reference = save_tiny(NAME, directory)
    config = read_config(directory).for_context(ORIGINAL + 1)
    backend = backend_for(config)
    model = load_model(directory, config, backend=backend, dtype="float32", device="cpu")
    tokens = torch.randint(61, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    driver = PagedDriver(model, backend)
    ours = torch.cat(
        [driver.step({"r": piece})["r"] for piece in (tokens[:7], tokens[7:16], tokens[16:17], tokens[17:])]
    )
    expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    within = reference(torch.tensor([tokens[:ORIGINAL]])).logits[0]
    assert not torch.allclose(within, expected[:ORIGINAL], rtol=1e-2, atol=1e-2), "else both sets are the same"


@pytest.mark.parametrize(
    ("asked", "long", "most"), [(None, False, 16), (9, False, 16), (16, False, 16), (17, True, 512), (9999, True, 512)]
)
def test_the_context_asked_for_chooses(directory: Path, asked: int | None, long: bool, most: int) -> None:
    save_tiny(NAME, directory)
    config = read_config(directory).for_context(asked)
    assert (is_long(config), config.max_context_tokens) == (long, most)


def test_a_model_of_no_more_than_its_original_context_has_short_factors(directory: Path) -> None:
    save_tiny(NAME, directory)
    config = replace(read_config(directory), max_position_embeddings=ORIGINAL).for_context(ORIGINAL + 1)
    assert not is_long(config)


def test_nodes_with_different_factors_are_different_models(directory: Path) -> None:
    save_tiny(NAME, directory)
    config = read_config(directory)
    assert config_digest(config) == config_digest(config.for_context(ORIGINAL))
    assert config_digest(config) != config_digest(config.for_context(ORIGINAL + 1))
