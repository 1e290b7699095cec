"""What is installed is pinned, and what is imported is declared."""

import ast
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = tuple(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("bench", "tests"))
# Without setuptools' own copies of packages, which its import adds to the path.
INSTALLED = [sysconfig.get_path("purelib")]
# With which Python environments are made.
NOT_PINNED = {"baton-client", "baton-serving", "baton-tools", "pip", "setuptools", "wheel"}
PARTS = {"libucx", "pydantic_core", "starlette"}  # of ucxx, pydantic and fastapi, which come with them


def name_of(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def pins() -> dict[str, set[str]]:
    """Versions by name. The packages of the extra `attention` have a file of their own."""
    found: dict[str, set[str]] = {}
    for file in ("constraints.txt", "constraints-attention.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith("#"):
                name, version = line.split("==")
                found.setdefault(name_of(name), set()).add(version)
    return found


def test_every_installed_distribution_is_pinned_at_its_version() -> None:
    """`make install` gives all of them to pip as constraints: one without a pin changes from one day to the next."""
    pinned = pins()
    wrong = {
        f"{name}=={version.public}"
        for name, version in (
            (name_of(each.metadata["Name"]), Version(each.version)) for each in distributions(path=INSTALLED)
        )
        if name not in NOT_PINNED and version.public not in pinned.get(name, ())
    }
    assert wrong == set()


def test_the_constraints_are_sorted_and_each_stands_once() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines == sorted(set(lines), key=str.lower)


def test_every_imported_distribution_is_declared() -> None:
    """One that comes only because another needs it goes when that one no longer does."""
    declared = {
        name_of(Requirement(each).name)
        for each in chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    }
    providers = packages_distributions()
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in imported(path)
        if name in providers.keys() - PARTS and not declared & set(map(name_of, providers[name]))
    }
    assert wrong == set()


def imported(path: Path) -> Iterator[str]:
    """The top names of the third-party modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in (*PACKAGES, "bench", "tests"):
                yield top
