"""The program `baton`: its commands."""

import sys
from typing import Annotated

import typer

from baton.cli.certs import certs, key
from baton.cli.chat import chat
from baton.cli.doctor import doctor
from baton.cli.expert_load import expert_load
from baton.cli.generate import generate
from baton.cli.program import new_app, run
from baton.cli.roles import PASS_ON, decode_node, gateway, picker, prefill_node
from baton.cli.status import status
from baton.cli.switch_role import role as switch_role
from baton.cli.tools import bench, plan
from baton.cli.top import top
from baton.cli.up import demo, up
from baton.core.version import __version__


def main() -> None:
    """The program `baton`."""
    run(program(), sys.argv[1:] or ["--help"], "baton")


def program() -> typer.Typer:
    """Its commands."""
    app = new_app()
    app.callback()(_whole_program)
    for command in (up, chat, generate, status, top, demo, doctor, certs, key):
        app.command()(command)
    app.command("role")(switch_role)
    app.command("expert-load")(expert_load)
    for role in (prefill_node, decode_node, gateway, picker, bench, plan):
        app.command(context_settings=PASS_ON)(role)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"baton {__version__}")
        raise typer.Exit


def _whole_program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate nodes."""
