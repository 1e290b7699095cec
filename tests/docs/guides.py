"""The guides: pages whose blocks are files and changes of the source, and commands that test them in a copy of it."""

import shutil
from pathlib import Path

from docs.site_files import ROOT
from tests.docs.blocks import Block

GUIDES = ("docs/adding-a-backend.md", "docs/adding-a-model.md", "docs/adding-a-transport.md")
_LEFT_OUT = (".*", "site", "build", "dist")


def copy_source(target: Path) -> None:
    """The repository's Python files, with what was compiled of them, and its pyproject.toml."""
    for top in ROOT.iterdir():
        if top.is_dir() and not any(top.match(pattern) for pattern in _LEFT_OUT):
            shutil.copytree(top, target / top.name, ignore=_not_python)
    shutil.copyfile(ROOT / "pyproject.toml", target / "pyproject.toml")


def apply(block: Block, source: Path) -> None:
    """Writes the file of a `python` block, or makes the change of a `diff` block: its title is the path.

    Raises:
        AssertionError: the file exists already, or what a change replaces is not there exactly once.
    """
    path = source / block.title
    if block.language == "python":
        assert not path.exists(), f"{block.where}: {block.title} exists"
        path.write_text(block.code)
        return
    before, after = sides(block.code)
    text = path.read_text()
    assert text.count(before) == 1, f"{block.where}: {block.title} does not have this once:\n{before}"
    path.write_text(text.replace(before, after))


def is_of_plugin(block: Block) -> bool:
    """Whether the block is a file of a distribution outside of the tree."""
    return block.title.startswith("baton_")


def sides(diff: str) -> tuple[str, str]:
    """The text before and after a change, whose lines begin with a space, + or -."""
    lines = [line or " " for line in diff.splitlines()]
    assert {line[0] for line in lines} <= set(" +-"), diff
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
    return before, after


def _not_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith((".py", ".pyi", ".pyc")) or (Path(folder) / name).is_dir())]
