"""One tiny checkpoint for all engine tests."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import BuiltRunner
from tests.unit.engine.tiny import build
from tests.unit.models.tiny import save_tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Its directory, and transformers' own model."""
    directory = tmp_path_factory.mktemp("llama")
    return directory, save_tiny("llama", directory)


@pytest.fixture
def built(llama: tuple[Path, Any]) -> BuiltRunner:
    return build(llama[0])
