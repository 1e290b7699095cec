"""Runs a command line. An error is one line on stderr, and the exit code tells its kind."""

import io
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from baton.cli.grouped_help import App, GroupedCommands
from baton.core.errors import BatonError
from baton.core.logs import write_line

# Base class of the errors for wrong flags; typer exports only some of its subclasses.
_UsageError: Any = typer.BadParameter.__bases__[0]


def new_app(*, completion: bool = False) -> typer.Typer:
    """Returns a program without commands.

    Args:
        completion: add flags that install or show shell completion.
    """
    return App(cls=GroupedCommands, add_completion=completion, pretty_exceptions_enable=False, rich_markup_mode=None)


def run(app: typer.Typer, arguments: Sequence[str], program: str) -> NoReturn:
    """Runs the command and ends the process. Exit codes: 0, 1 for an error, 2 for a wrong flag, 130 after Ctrl-C.

    Args:
        program: the program's name in messages.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths, names and texts may have characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(list(arguments), prog_name=program, standalone_mode=False)
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else program
        message = error.format_message().rstrip(".")
        value = _value_of(arguments, getattr(getattr(error, "param", None), "opts", ()))
        if value is not None and value not in message:
            message += f", not {value}"
        code = _fail(f"{message}; see `{path} --help`", 2)
    except BatonError as error:
        code = _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    raise SystemExit(code)


def _value_of(arguments: Sequence[str], flags: Sequence[str]) -> str | None:
    """Returns the value that the command line gives for a flag; click's errors about bounds do not name it."""
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        flag, has_value, value = argument.partition("=")
        if flag in flags:
            return value if has_value else following
    return None


def _fail(line: str, code: int) -> int:
    write_line(f"baton: {line}")
    return code
