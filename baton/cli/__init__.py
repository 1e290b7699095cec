"""The command line: `baton generate`, `status`, `up`, `demo`, `doctor`. An error is one line on stderr."""

import sys
from typing import Any

import typer

from baton.cli.doctor import doctor
from baton.cli.generate import generate
from baton.cli.status import status
from baton.cli.up import demo, up
from baton.errors import BatonError

# Base class of the errors for wrong flags. typer exports only some of its subclasses.
_UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> None:
    """The program `baton`. Exit codes: 0, 1 for an error, 2 for a wrong flag, 130 after Ctrl-C."""
    app = typer.Typer(
        help="Serve large language models with prefill and decode on separate nodes.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (generate, status, up, demo, doctor):
        app.command()(command)
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


def _fail(line: str, code: int) -> int:
    print(f"baton: {line}", file=sys.stderr)
    return code
