"""Checks a command without running it: its verbs, flags, variables, modules and files exist. Pure, except that it looks
at the repository's files."""

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import typer
from typer.main import get_command

from baton.cli import program
from baton.core.setting_names import CLIENT_VARIABLES, flag, variable
from baton.load.command import bench
from baton.planner.command import plan
from baton.settings.config import ProcessSettings
from baton.settings.gateway_config import GatewaySettings, PickerSettings
from baton.settings.node_config import DecodeSettings, PrefillSettings
from docs.site_files import ROOT

ROLES: Mapping[str, type[ProcessSettings]] = {
    "prefill-node": PrefillSettings,
    "decode-node": DecodeSettings,
    "gateway": GatewaySettings,
    "picker": PickerSettings,
}
# Read by scripts of ours, by the installation and by tests.
_OTHER_VARIABLES = {"BATON_REPOSITORY_URL"}
_ENDS = re.compile(r"&&|\|\||[|;&\n]")
_VARIABLE = re.compile(r"\bBATON_[A-Z_]+\b")


def faults(command: str) -> list[str]:
    """Everything that is wrong with a command line; [] if nothing is."""
    text = re.sub(r"\\\n\s*", " ", command)
    found = [f"no setting {name}" for name in _VARIABLE.findall(text) if name not in variables()]
    for words in _simple_commands(text):
        found += _faults(words)
    return found + [f"no file {path}" for path in _named_files(text) if not (ROOT / path).exists()]


@cache
def flags_of(name: str) -> frozenset[str]:
    """The flags of one command of `baton`; KeyError: there is no such command."""
    if name in ROLES:
        return frozenset({"--help", *map(flag, ROLES[name].model_fields)})
    if name in ("bench", "plan"):
        app = typer.Typer(add_completion=False)
        app.command()(bench if name == "bench" else plan)
        return _options(get_command(app))
    return _options(_commands()[name])


def commands() -> tuple[str, ...]:
    return tuple(_commands())


@cache
def variables() -> set[str]:
    """Every BATON_ variable that something reads."""
    settings = {variable(name) for cls in ROLES.values() for name in cls.model_fields}
    return settings | set(CLIENT_VARIABLES) | _OTHER_VARIABLES


@cache
def verbs() -> set[str]:
    """Of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


@cache
def _commands() -> Mapping[str, Any]:
    commands: Mapping[str, Any] = getattr(get_command(program()), "commands", {})
    return commands


def _options(command: Any) -> frozenset[str]:
    return frozenset({"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))})


def _simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each part of a pipeline or list, without variables in front and without redirections."""
    for part in _ENDS.split(re.sub(r"(?m)(^|\s)#.*$", "", text)):
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        while words and re.match(r"\w+=", words[0]):
            del words[0]
        if words:
            yield words


def _faults(words: list[str]) -> list[str]:
    name, rest = words[0].rpartition("/")[2], words[1:]
    if name == "make":
        return [f"no verb `make {word}`" for word in rest if "=" not in word and word not in verbs()]
    if name == "python" and "-m" in rest:
        module = rest[rest.index("-m") + 1]
        return [] if _exists(module) else [f"no module {module}"]
    if name != "baton" or not rest or rest[0] == "--version":
        return []
    if rest[0] not in commands():
        return [f"no command `baton {rest[0]}`"]
    known = flags_of(rest[0])
    given = [word.partition("=")[0] for word in rest[1:] if word.startswith("-") and word != "-"]
    return [f"`baton {rest[0]}` has no {word}" for word in given if word not in known]


def _exists(module: str) -> bool:
    if (ROOT / module.split(".")[0]).is_dir():
        path = ROOT.joinpath(*module.split("."))
        return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    package = module.split(".")[0]
    # NOTE: the path first. `find_spec("pip")` warns if anything has imported distutils, because of setuptools' hook.
    return PathFinder.find_spec(package) is not None or find_spec(package) is not None


def _named_files(text: str) -> Iterator[str]:
    """Words that name something below a folder of this repository."""
    folders = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    for match in re.finditer(rf"(?<![\w/.:-])(?:{folders})/[\w./-]*[\w-]", text):
        if not match[0].startswith(("site/", "build/", "dist/")):
            yield match[0]
