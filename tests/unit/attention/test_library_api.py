"""The names that docs/attention.md calls library API exist, and no node uses them."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from docs.attention import LIBRARY_API

ROOT = Path(__file__).resolve().parents[3]
NODES = ("decode_node", "engine", "gateway", "kvtransfer", "models", "node", "prefill_node")
SOURCES = {path: path.read_text() for package in NODES for path in sorted((ROOT / package).rglob("*.py"))}


@pytest.mark.parametrize("name", [name for name, _ in LIBRARY_API])
def test_it_exists_and_no_node_uses_it(name: str) -> None:
    assert resolve_name(name) is not None
    word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    assert [str(path.relative_to(ROOT)) for path, text in SOURCES.items() if word.search(text)] == []
