"""Prints --help in groups: commands and flags appear under the title of their `rich_help_panel`.

The output is plain text, because rich's boxes cut off names of flags on terminals of 80 columns.
"""

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

Rows = list[tuple[str, str]]


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


class App(typer.Typer):
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
