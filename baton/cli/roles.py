"""`baton prefill-node`, `decode-node`, `gateway` and `picker`: each runs its module, and passes all flags on."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from baton.settings.environment import child_environment

# The whole command line goes to the role, which has its own parser and its own --help.
PASS_ON: dict[str, object] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

Flags = Annotated[list[str] | None, typer.Argument(help="Settings of the role.", metavar="[FLAGS]")]


def prefill_node(flags: Flags = None) -> None:
    """Run a node that computes prompts; see its own --help."""
    become("prefill_node", flags)


def decode_node(flags: Flags = None) -> None:
    """Run a node that generates tokens; see its own --help."""
    become("decode_node", flags)


def gateway(flags: Flags = None) -> None:
    """Run a gateway, which clients call; see its own --help."""
    become("baton.gateway", flags)


def picker(flags: Flags = None) -> None:
    """Run a server that picks gateways for a proxy; see --help."""
    become("baton.gateway.picker", flags)


def become(module: str, flags: list[str] | None) -> NoReturn:
    """Replaces this process by `python -m module`, so that signals and exit code are the module's own."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *(flags or ())], child_environment())
