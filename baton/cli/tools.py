"""`baton bench` and `baton plan`: each runs its module of `baton-tools`, and passes all flags on."""

from importlib.util import find_spec
from typing import NoReturn

from baton.cli.roles import Flags, become
from baton.core.errors import ConfigError


def bench(flags: Flags = None) -> None:
    """Measure latency and goodput; see its own --help."""
    become_tool("bench", "baton.load", flags)


def plan(flags: Flags = None) -> None:
    """Find how many nodes a load needs; see its own --help."""
    become_tool("plan", "baton.planner", flags)


def become_tool(command: str, module: str, flags: list[str] | None) -> NoReturn:
    """Replaces this process by the tool.
    Raises:
        ConfigError: the tool is not installed.
    """
    if find_spec(module) is None:
        raise ConfigError(f"`baton {command}` is not installed", cure="pip install 'baton-serving[tools]'")
    become(module, flags)
