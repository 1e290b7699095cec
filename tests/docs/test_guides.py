"""The guides' files and changes, made in one copy of the source, pass the guides' own commands."""

import json
import shlex
import sys
from functools import partial
from pathlib import Path

from tests.docs.blocks import blocks
from tests.docs.guides import GUIDES, apply, copy_source, is_of_plugin
from tests.warm import run_warm

_PYTEST = [".venv/bin/python", "-m", "pytest"]
_OPTIONS = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]


def test_what_the_guides_add_passes_their_commands(tmp_path: Path) -> None:
    copy_source(tmp_path)
    runs: list[str] = []
    tested = set()
    for block in blocks():
        if block.page in GUIDES and block.language == "console":
            runs += [json.dumps(_OPTIONS + arguments(command)) for command in block.commands]
            tested.add(block.page)
        elif block.page in GUIDES and not is_of_plugin(block):
            apply(block, tmp_path)
    assert tested == set(GUIDES), "a guide has no command that tests what it adds"
    done = run_warm(
        "tests.docs.guided", *runs, prepare=partial(import_from, tmp_path), folder=tmp_path, timeout_s=550.0
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-1000:]}"


def arguments(command: str) -> list[str]:
    """A command's arguments for pytest."""
    words = shlex.split(command)
    assert words[:3] == _PYTEST, f"{command}: a guide tests by {' '.join(_PYTEST)}"
    return words[3:]


def import_from(source: Path) -> None:
    """Has a forked process, which has imported this repository's modules, import those of the copy."""
    ours = {path.name for path in source.iterdir()}
    for name in list(sys.modules):
        if name.partition(".")[0] in ours:
            del sys.modules[name]
    sys.path.insert(0, str(source))
