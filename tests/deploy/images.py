"""Reads the Dockerfile: its stages, and what an image of a target sets and starts."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """One FROM and the instructions that follow it."""

    name: str
    parent: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def read_stages(dockerfile: Path) -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    for line in text.splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            parent, name = rest.split(" AS ")
            stages[name] = Stage(name, parent)
        elif keyword and stages:
            list(stages.values())[-1].instructions.append((keyword, rest.strip()))
    return stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """The stage and its parents, outermost first."""
    chain: list[Stage] = []
    while name in stages:
        chain.insert(0, stages[name])
        name = stages[name].parent
    return chain


def instructions(stages: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    return [instruction for stage in lineage(stages, name) for instruction in stage.instructions]


def environment_of(stages: dict[str, Stage], name: str) -> dict[str, str]:
    """What ENV sets; a later line wins."""
    found: dict[str, str] = {}
    for keyword, rest in instructions(stages, name):
        if keyword == "ENV":
            found.update((name, value) for name, _, value in (word.partition("=") for word in rest.split()))
    return found


def entrypoint_of(stages: dict[str, Stage], name: str) -> list[str]:
    command = json.loads(dict(instructions(stages, name))["ENTRYPOINT"])
    assert isinstance(command, list)
    return command
