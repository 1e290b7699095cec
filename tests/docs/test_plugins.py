"""The guides' additions also work as distributions outside of the tree, which entry points register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.settings.environment import child_environment
from tests.docs.blocks import blocks
from tests.docs.guides import GUIDES, is_of_plugin

# The guides' files of the tree, and what they are called in the distributions.
FILES = {
    "attention/backends/textbook.py": "baton_textbook/baton_textbook.py",
    "kvtransfer/transports/folder.py": "baton_folder/baton_folder.py",
    "baton/models/families/dense/olmo.py": "baton_olmo/olmo.py",
    "baton/models/families/dense/olmo_config.py": "baton_olmo/olmo_config.py",
}
OLMO = {
    "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 256, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
USE_ALL = """
import sys
from pathlib import Path

from attention.platform import Platform
from attention.selection import select_backend
from baton.models.families.reader import read_config
from baton.models.families.table import family_of
from baton.settings.node_config import PrefillSettings
from kvtransfer.transports.table import open_transport
from tests.unit.attention.test_selection import LLAMA

print(select_backend(LLAMA, platform=Platform("cpu"), forced="textbook").capabilities.name)
transport = open_transport(PrefillSettings(transport="folder").transport)
print(type(transport).__name__)
transport.close()
print(family_of(read_config(Path(sys.argv[1])).architecture).model)
"""


@pytest.mark.slow
def test_what_the_guides_add_works_as_distributions_of_its_own(tmp_path: Path) -> None:
    source, installed, model = (tmp_path / name for name in ("source", "installed", "model"))
    model.mkdir()
    (model / "config.json").write_text(json.dumps(OLMO))
    for block in blocks():
        if block.page in GUIDES and (is_of_plugin(block) or block.title in FILES):
            path = source / FILES.get(block.title, block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(installed)]
    run("-m", "pip", "install", *options, *(str(folder) for folder in sorted(source.iterdir())))
    found = run("-c", USE_ALL, str(model), path=installed)
    assert found.split() == ["TEXTBOOK", "FolderTransport", "olmo:OlmoForCausalLM"]


def run(*arguments: str, path: Path | None = None) -> str:
    environment = child_environment()
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
