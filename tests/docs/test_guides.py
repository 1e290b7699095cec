"""Each guide's files and changes, made in a copy of the source, pass the guide's own commands."""

import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.docs.blocks import blocks
from tests.docs.guides import GUIDES, apply, copy_source
from tests.warm import run_warm

_PYTEST = [".venv/bin/python", "-m", "pytest"]


@pytest.mark.parametrize("page", GUIDES)
def test_what_a_guide_adds_passes_its_commands(page: str, tmp_path: Path) -> None:
    copy_source(tmp_path)
    ran = []
    for block in blocks():
        if block.page != page:
            continue
        if block.language == "console":
            ran += [command for command in block.commands if passes(command, tmp_path)]
        else:
            apply(block, tmp_path)
    assert ran, f"{page} has no command that tests what it adds"


def passes(command: str, source: Path) -> bool:
    """Runs a command of pytest in the copy; raises AssertionError with its output if a test fails or none is chosen."""
    words = shlex.split(command)
    assert words[:3] == _PYTEST, f"{command}: a guide tests by {' '.join(_PYTEST)}"
    done = run_warm(
        "pytest", "-q", "-p", "no:cacheprovider", *words[3:], prepare=partial(import_from, source), folder=source
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    return True


def import_from(source: Path) -> None:
    """Has a forked process, which has imported this repository's modules, import those of the copy."""
    ours = {path.name for path in source.iterdir()}
    for name in list(sys.modules):
        if name.partition(".")[0] in ours:
            del sys.modules[name]
    sys.path.insert(0, str(source))
