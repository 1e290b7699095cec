"""The Dockerfile, read as text without a container engine, provides what the manifests rely on."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from baton.core.version import __version__
from tests.deploy.images import Stage, instructions, read_stages
from tests.deploy.manifests import ROLES, ROOT, Rendered

PROGRAMS = {
    "gateway": "baton.gateway",
    "gateway-kubernetes": "baton.gateway",
    "prefill": "prefill_node",
    "decode": "decode_node",
    "prefill-cuda": "prefill_node",
    "decode-cuda": "decode_node",
    "prefill-rdma": "prefill_node",
    "decode-rdma": "decode_node",
}
COMPILERS = re.compile(r"\b(build-essential|gcc|g\+\+|clang|cmake|make)\b")

# Every module, because the program imports most of them only after it has read its settings.
IMPORT_GATEWAY = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import baton.gateway as gateway
for module in pkgutil.walk_packages(gateway.__path__, "baton.gateway."):
    importlib.import_module(module.name)
"""


@pytest.fixture(scope="module")
def stages(dockerfile: Path) -> dict[str, Stage]:
    return read_stages(dockerfile)


def test_the_linter_finds_nothing(dockerfile: Path) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", PROGRAMS)
def test_a_target_starts_its_process_as_a_numbered_user(stages: dict[str, Stage], target: str) -> None:
    found = dict(instructions(stages, target))
    assert found["ENTRYPOINT"] == f'["python", "-m", "{PROGRAMS[target]}"]'
    assert found["USER"] == "65532:65532"
    assert (ROOT / PROGRAMS[target].replace(".", "/") / "__main__.py").is_file()


@pytest.mark.parametrize("target", ["gateway", "prefill", "decode"])
def test_a_target_without_a_gpu_has_no_compiler_and_installs_no_packages(stages: dict[str, Stage], target: str) -> None:
    runs = " ".join(text for keyword, text in instructions(stages, target) if keyword == "RUN")
    assert not COMPILERS.search(runs)
    assert not re.search(r"\b(pip|apt-get)\b", runs)


@pytest.mark.parametrize("target", ["prefill-cuda", "decode-cuda"])
def test_a_target_for_gpus_has_the_compiler_that_triton_calls_and_nothing_else(
    stages: dict[str, Stage], target: str
) -> None:
    runs = " ".join(text for keyword, text in instructions(stages, target) if keyword == "RUN")
    (packages,) = re.findall(r"apt-get install ([^&]*)&", runs)
    assert [word for word in packages.split() if not word.startswith("-")] == ["gcc", "libc6-dev"]
    assert "pip" not in runs.split()


def test_every_image_of_every_manifest_is_a_target(rendered: Rendered, stages: dict[str, Stage]) -> None:
    for role in ROLES:
        name, _, tag = rendered.container(role)["image"].partition(":")
        assert name.removeprefix("baton-") in stages
        assert tag == __version__


def test_image_and_manifest_agree_on_the_ports(base: Rendered, stages: dict[str, Stage]) -> None:
    variables = {"grpc": "BATON_LISTEN", "http": "BATON_HTTP_LISTEN"}
    for target in PROGRAMS:
        ports = base.ports(target.partition("-")[0])
        found = [(keyword, rest.split()) for keyword, rest in instructions(stages, target)]
        assert ("EXPOSE", [str(port) for port in ports.values()]) in found
        assert ("ENV", [f"{variables[name]}=[::]:{port}" for name, port in ports.items()]) in found


def test_no_base_image_floats(stages: dict[str, Stage], dockerfile: Path) -> None:
    outside = {stage.parent for stage in stages.values()} - set(stages)
    named = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", dockerfile.read_text(), flags=re.MULTILINE))
    assert outside == {f"${{{name}}}" for name in named}
    assert re.fullmatch(r"python:3\.1[12][\w.]*-slim-\w+", named["PYTHON_IMAGE"])
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-devel-[\w.]+", named["CUDA_IMAGE"])


def test_dependencies_are_held_to_the_constraints(stages: dict[str, Stage]) -> None:
    installs = [text for stage in stages.values() for keyword, text in stage.instructions if "pip install" in text]
    assert installs
    for text in installs:
        assert "--constraint constraints.txt" in text or "--no-deps --no-index" in text


def test_the_gateway_runs_without_the_packages_that_its_image_lacks(dockerfile: Path) -> None:
    (pattern,) = re.findall(r"grep -vE '(\^\(.*\)\\b)' node\.txt > gateway\.txt", dockerfile.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left_out = [re.split(r"[<>=~! -]", text)[0] for text in project["dependencies"] if re.match(pattern, text)]
    assert left_out == ["safetensors", "torch", "triton", "ucxx"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_GATEWAY, *left_out],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_package_reaches_the_build(dockerfile: Path) -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.removesuffix("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {"constraints.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert let_in == packages | files | {"protos", "deploy/packages"}
    on_disk = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    assert packages == on_disk
