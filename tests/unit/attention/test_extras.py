"""The extras of the package install what its attention backends need, in pinned versions; the docs name them."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from attention.platform import OPTIONAL_PACKAGES
from attention.selection import BACKENDS, BackendClass

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# By the name that imports them.
DISTRIBUTIONS = {"flash_attn": "flash-attn", "flashinfer": "flashinfer-python", "xformers": "xformers"}
WITH_PACKAGES = [backend for backend in BACKENDS if backend.capabilities.package is not None]


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def extra_of(backend: BackendClass) -> str:
    found = re.fullmatch(r"pip install (?:--no-build-isolation )?'baton-serving\[(.+)\]'", backend.capabilities.install)
    assert found is not None, backend.capabilities.install
    return found[1]


@pytest.mark.parametrize("backend", WITH_PACKAGES, ids=lambda backend: backend.capabilities.name)
def test_the_command_of_a_missing_package_names_an_extra_that_has_it_and_the_docs_have_it(
    backend: BackendClass,
) -> None:
    package = backend.capabilities.package
    assert package in OPTIONAL_PACKAGES
    assert DISTRIBUTIONS[package] in {Requirement(each).name for each in EXTRAS[extra_of(backend)]}
    assert backend.capabilities.install in (ROOT / "docs" / "attention.md").read_text()


@pytest.mark.parametrize("extra", ["attention", "flash-attn"])
def test_the_pinned_versions_are_those_that_the_extra_allows(extra: str) -> None:
    pinned = pins("constraints-attention.txt")
    for each in EXTRAS[extra]:
        requirement = Requirement(each)
        assert requirement.specifier.contains(pinned[requirement.name]), each


def test_torch_and_triton_are_those_of_the_other_constraints() -> None:
    ours, others = pins("constraints-attention.txt"), pins("constraints.txt")
    assert (ours["torch"], ours["triton"]) == (others["torch"], others["triton"])
