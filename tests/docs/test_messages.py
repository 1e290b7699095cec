"""Everything that errors, logs and help advise exists: packages and extras, flags, variables, commands and verbs."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site_files import ROOT
from tests.docs.commands import ROLES, commands, flags_of, variables, verbs

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
_INSTALL = re.compile(r"pip install ((?:--[\w-]+ )*)'?(\w[\w.-]*)(?:\[([\w,-]+)\])?")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
_VARIABLE = re.compile(r"\bBATON_[A-Z_]+\b")
_COMMAND = re.compile(r"`(?:\.venv/bin/)?(baton|make) ([a-z-]+)\b")
# Of pip, Docker and curl.
OTHERS_FLAGS = {"--no-build-isolation", "--no-deps", "--shm-size", "--header", "--data", "--fail"}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The sentences of a file without its docstrings, with their lines."""
    tree = ast.parse(path.read_text())
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in docstrings
        ):
            yield node.lineno, node.value


def wrong_advice(text: str) -> Iterator[str]:
    for _, package, extras in _INSTALL.findall(text):
        if package != PROJECT["name"]:
            yield f"pip install {package}"
        offered = {"", *PROJECT["optional-dependencies"]}
        yield from (f"no extra {each}" for each in extras.split(",") if each not in offered)
    if flags := _FLAG.findall(text):
        known = OTHERS_FLAGS.union(*map(flags_of, (*commands(), *ROLES)))
        yield from (f"no flag {flag}" for flag in flags if flag not in known)
    yield from (f"no variable {name}" for name in _VARIABLE.findall(text) if name not in variables())
    for program, verb in _COMMAND.findall(text):
        if verb not in (commands() if program == "baton" else verbs()):
            yield f"no command {program} {verb}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_what_messages_advise_exists(package: Path) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted(package.rglob("*.py"))
        for line, text in texts(path)
        for what in wrong_advice(text)
    ]
    assert wrong == []
