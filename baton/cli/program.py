"""Runs a command line. An error is one line on stderr, and the exit code depends on its kind. The error for a flag of
an older release names what to use."""

import io
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from baton.core.errors import BatonError
from baton.core.logs import write_line
from baton.core.setting_names import variable
from baton.settings.reader import SETTINGS, cure_of_older

# Base class of the errors for wrong flags; typer exports only some of its subclasses.
_UsageError: Any = typer.BadParameter.__bases__[0]


# Help is plain text: rich's boxes cut off names of flags on terminals of 80 columns.
Rows = list[tuple[str, str]]


# Flags of commands that older releases had.
_RENAMED: Mapping[str, str] = MappingProxyType(
    {"--tls-ca": "--client-ca", "--prefill": "--prefill-nodes", "--decode": "--decode-nodes"}
)
# Commands with this flag start a cluster, whose other settings come from variables.
_STARTS_CLUSTER = "--prefill-kv-cache-layout"


class GroupedCommands(TyperGroup):
    """A program whose help lists its commands in groups."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # noqa: ARG002
        commands = [(name, command) for name, command in self.commands.items() if not command.hidden]
        width = max((len(name) for name, _ in commands), default=0)
        limit = formatter.width - 6 - width
        groups: dict[str, Rows] = {}
        for name, command in commands:
            row = (f"{name:<{width}}", command.get_short_help_str(limit))
            groups.setdefault(_title(command, "Commands"), []).append(row)
        _write(formatter, groups.items())


class GroupedFlags(TyperCommand):
    """A command whose help lists its flags in groups."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        groups: dict[str, Rows] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(_title(parameter, kind), []).append(record)
        _write(formatter, groups.items())


class GroupedHelpApp(typer.Typer):
    """A program whose commands have grouped help."""

    def command(self, name: str | None = None, **settings: Any) -> Any:
        return super().command(name, **{"cls": GroupedFlags, **settings})


def _title(named: object, default: str) -> str:
    """Returns the group's title of a command or flag."""
    title = getattr(named, "rich_help_panel", None)
    return title if isinstance(title, str) and title else default


def _write(formatter: Any, groups: Iterable[tuple[str, Rows]]) -> None:
    for title, rows in groups:
        with formatter.section(title):
            formatter.write_dl(rows)


def new_app(*, completion: bool = False) -> typer.Typer:
    """Returns a program without commands.

    Args:
        completion: add flags that install or show shell completion.
    """
    return GroupedHelpApp(
        cls=GroupedCommands, add_completion=completion, pretty_exceptions_enable=False, rich_markup_mode=None
    )


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
        message = _without_older_flag(error) or error.format_message().rstrip(".")
        value = _value_of(arguments, getattr(getattr(error, "param", None), "opts", ()))
        if value is not None and value not in message:
            message += f", not {value}"
        code = _fail(f"{message}; see `{path} --help`", 2)
    except BatonError as error:
        code = _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    raise SystemExit(code)


def _without_older_flag(error: Any) -> str:
    """The message for a flag that an older release had, or that is a setting. Returns "" for others."""
    name, context = getattr(error, "option_name", None), error.ctx
    if name is None or context is None:
        return ""
    flags = {flag for parameter in context.command.params for flag in parameter.opts}
    cure = cure_of_flag(name, flags)
    return f"{name} is not a flag of `{context.command_path}`; {cure}" if cure else ""


def _value_of(arguments: Sequence[str], flags: Sequence[str]) -> str | None:
    """Returns the value that the command line gives for a flag; click's errors about bounds do not name it."""
    for argument, following in zip_longest(arguments, arguments[1:]):
        flag, has_value, value = argument.partition("=")
        if flag in flags:
            return value if has_value else following
    return None


def _fail(line: str, code: int) -> int:
    write_line(f"baton: {line}")
    return code


def cure_of_flag(name: str, flags: Collection[str]) -> str | None:
    """What to do instead of giving this flag. Returns None if nothing is known about its name.

    Args:
        flags: those that the command has.
    """
    if _RENAMED.get(name) in flags:
        return f"use {_RENAMED[name]}"
    if _STARTS_CLUSTER not in flags:
        return None
    setting = name.removeprefix("--").replace("-", "_")
    if setting in SETTINGS:
        return f"set {variable(setting)}"
    cure = cure_of_older(setting, variable)
    return cure and cure.replace("use ", "set ", 1)
