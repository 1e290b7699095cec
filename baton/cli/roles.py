"""`baton prefill-node`, `decode-node`, `gateway`, `picker`: the same as `python -m` of the role's module, flags too."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from baton.settings.environment import child_environment

# All of it goes to the role, which has its own parser and its own --help.
PASS_ON: dict[str, object] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

Flags = Annotated[list[str] | None, typer.Argument(help="Settings of the role.", metavar="[FLAGS]")]


def prefill_node(flags: Flags = None) -> None:
    """Run one prefill node; --help shows all settings."""
    become("prefill_node", flags)


def decode_node(flags: Flags = None) -> None:
    """Run one decode node; --help shows all settings."""
    become("decode_node", flags)


def gateway(flags: Flags = None) -> None:
    """Run a gateway; --help shows all settings."""
    become("baton.gateway", flags)


def picker(flags: Flags = None) -> None:
    """Choose gateways for a proxy; --help shows all settings."""
    become("baton.gateway.picker", flags)


def become(module: str, flags: list[str] | None) -> NoReturn:
    """Replaces this process, so that signals and the exit code are the role's own."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *(flags or ())], child_environment())
