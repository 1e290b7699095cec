"""The program `baton`: its commands, and its errors, each one line on stderr."""

import sys
from typing import Annotated, Any

import typer

from baton import __version__
from baton.cli.chat import chat
from baton.cli.doctor import doctor
from baton.cli.generate import generate
from baton.cli.roles import PASS_ON, decode_node, gateway, prefill_node
from baton.cli.status import status
from baton.cli.up import demo, up
from baton.errors import BatonError

# Base class of the errors for wrong flags. typer exports only some of its subclasses.
_UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> None:
    """The program `baton`. Exit codes: 0, 1 for an error, 2 for a wrong flag, 130 after Ctrl-C."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_whole_program)
    for command in (up, chat, generate, status, demo, doctor):
        app.command()(command)
    for role in (prefill_node, decode_node, gateway):
        app.command(context_settings=PASS_ON)(role)
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="baton", standalone_mode=False)
    except _UsageError as error:
        program = error.ctx.command_path if error.ctx is not None else "baton"
        code = _fail(f"{error.format_message().rstrip('.')}; see `{program} --help`", 2)
    except BatonError as error:
        code = _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    raise SystemExit(code)


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


def _fail(line: str, code: int) -> int:
    print(f"baton: {line}", file=sys.stderr)
    return code
