"""The distributions share folders and no file: each imports only itself and what it depends on."""

import ast
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from baton.core.version import __version__
from baton.settings.environment import child_environment

ROOT = Path(__file__).resolve().parents[3]
SPLIT = runpy.run_path(str(ROOT / "deploy/packages/split.py"))
FOLDERS = {"baton-serving": ".", "baton-client": "deploy/packages/client", "baton-tools": "deploy/packages/tools"}
# Which of ours each one may import.
NEEDS = {
    "baton-client": set[str](),
    "baton-serving": {"baton-client"},
    "baton-tools": {"baton-client", "baton-serving"},
}
SHIPPED = ("attention", "baton", "decode_node", "kvtransfer", "prefill_node")
# The distributions of what the client imports.
CLIENT_IMPORTS = {
    "cryptography": "cryptography", "google.protobuf": "protobuf", "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio", "grpc_status": "grpcio-status",
}  # fmt: skip

distribution_of: Callable[[str], str] = SPLIT["distribution_of"]
MODULES = {  # not those that are generated
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in SHIPPED
    for path in (ROOT / folder).rglob("*.py")
    if "_pb2" not in path.name
}


def project(distribution: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / FOLDERS[distribution] / "pyproject.toml").read_text())["project"]
    return found


def imported_names(path: Path) -> Iterator[str]:
    """Every module that a file may import, at the top or inside of a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


@pytest.mark.parametrize("distribution", FOLDERS)
def test_a_distribution_imports_only_itself_and_what_it_depends_on(distribution: str) -> None:
    wrong = {
        f"{name} imports {each} of {distribution_of(each)}"
        for name, path in MODULES.items()
        if distribution_of(name) == distribution
        for each in imported_names(path)
        if each in MODULES and distribution_of(each) not in NEEDS[distribution] | {distribution}
    }
    assert wrong == set()


@pytest.mark.parametrize("distribution", FOLDERS)
def test_distributions_of_one_tree_need_each_other_at_the_same_version(distribution: str) -> None:
    required = [Requirement(each) for each in project(distribution)["dependencies"]]
    versions = {each.name: str(each.specifier) for each in required if each.name in FOLDERS}
    assert versions == dict.fromkeys(NEEDS[distribution], f"=={__version__}")


def test_the_extra_tools_installs_the_tools_of_the_same_version() -> None:
    assert project("baton-serving")["optional-dependencies"]["tools"] == [f"baton-tools=={__version__}"]


def test_the_client_requires_exactly_what_it_imports() -> None:
    found = {
        each
        for name, path in MODULES.items()
        if distribution_of(name) == "baton-client"
        for each in imported_names(path)
        if each not in MODULES and each.partition(".")[0] not in {*sys.stdlib_module_names, *SHIPPED, "__future__"}
    }
    used = {
        CLIENT_IMPORTS.get(".".join(each.split(".")[:2])) or CLIENT_IMPORTS.get(each.partition(".")[0], each)
        for each in found
    }
    assert used == {Requirement(each).name for each in project("baton-client")["dependencies"]}


def test_every_pattern_of_the_split_matches_a_module() -> None:
    patterns = [pattern for each in SPLIT["PARTS"].values() for pattern in each]
    assert [each for each in patterns if not any(fnmatchcase(name, each) for name in MODULES)] == []


def test_users_modules_named_like_common_words_hide_none_of_ours(tmp_path: Path) -> None:
    """Python looks into the program's own folder first."""
    for name in ("models", "engine", "gateway", "client", "core", "node", "load", "protos", "security", "settings"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this is a module of the user')\n")
    (tmp_path / "program.py").write_text(
        "from baton import Client, Overloaded, SamplingParams\nprint(Client.__module__)\n"
    )
    environment = {name: value for name, value in child_environment().items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("baton.client")
