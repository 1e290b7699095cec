"""Everything that a command of a page names exists. These tests run no command; test_run.py does."""

import re
from pathlib import Path

import pytest

from docs.site_files import ROOT, pages
from tests.docs.blocks import OF_CLIENTS, OTHER, REASONS, RUNNABLE, Block, blocks, to_run
from tests.docs.commands import commands, faults, flags_of, variables
from tests.docs.guides import GUIDES

_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
# Commands that change what runs elsewhere, with whatever account the reader of a page has there.
_ELSEWHERE = re.compile(r"^\$ (?:.*\| *)?((?:kubectl|helm|docker|podman) (?!kustomize|template)\S+)", re.M)
# Flags of other people's programs that pages mention.
_OTHERS_FLAGS: set[str] = set()


@pytest.mark.parametrize(
    "block", [each for each in blocks() if each.language in RUNNABLE], ids=lambda block: block.where
)
def test_what_a_command_names_exists(block: Block) -> None:
    if block.language != "python":
        assert [fault for command in block.commands for fault in faults(command)] == []


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.where)
def test_a_block_says_what_it_is(block: Block) -> None:
    """An unnamed language could hide commands that nothing runs."""
    known = (*RUNNABLE, *OTHER, *(("js",) if block.marker else ()))
    assert block.language in known, f"{block.where}: ```{block.language}; allowed: {', '.join(known)}"
    if block.language == "console":
        assert block.commands, f"{block.where}: a console block needs a line that starts with `$ `"
    if block.title and block.language in RUNNABLE and block.page not in GUIDES:
        assert block.reason, f"{block.where}: {block.title!r}; allowed reasons: {', '.join(REASONS)}"
    assert not block.marker or block.page in OF_CLIENTS, f"{block.where}: `make test-clients` does not read this page"


def test_no_block_that_runs_here_changes_a_cluster_of_kubernetes_or_starts_containers() -> None:
    found = [(block.where, command) for block in to_run() for command in _ELSEWHERE.findall(block.code)]
    assert found == [], "the title of such a block says what it needs"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_command_hides_in_an_indented_block(page: Path) -> None:
    text = _FENCED.sub("", page.read_text())
    hidden = [
        line for line in text.splitlines() if re.match(r" {4,}(\$ |baton |make |python |kubectl |pip |\.venv/)", line)
    ]
    assert hidden == []


# CHANGELOG.md names commands and variables that no longer exist.
@pytest.mark.parametrize(
    "page",
    [page for page in pages() if page.name != "CHANGELOG.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_commands_and_variables_in_sentences_exist(page: Path) -> None:
    text = _FENCED.sub("", page.read_text())
    wrong = []
    for code in _INLINE.findall(text):
        wrong += [
            f"`{code}`: no setting {name}" for name in re.findall(r"\bBATON_[A-Z_]+\b", code) if name not in variables()
        ]
        words = code.split()
        if words[0] == "baton" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            wrong += [f"`{code}`: {fault}" for fault in _faults(words)]
    assert wrong == []


def _faults(words: list[str]) -> list[str]:
    if words[1] not in commands():
        return ["no such command"]
    given = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
    return [f"no flag {word}" for word in given if word not in flags_of(words[1])]
