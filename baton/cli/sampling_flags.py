"""Adds flags for the sampling parameters of `baton.core.sampling` to the commands that send prompts."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from baton.core.errors import InvalidRequest
from baton.core.sampling import SAMPLING_FIELDS, SamplingParams
from baton.core.sampling_field import Door, Kind, SamplingField

P = ParamSpec("P")

_TYPES: Mapping[Kind, Any] = {Kind.INTEGER: int, Kind.NUMBER: float, Kind.FLAG: bool, Kind.TEXTS: list[str]}


def takes_sampling_flags(door: Door) -> Callable[[Callable[Concatenate[SamplingParams, P], None]], Callable[..., None]]:
    """Returns a decorator that replaces a command's first parameter by the sampling flags of `door`."""
    taken = {name: field for name, field in SAMPLING_FIELDS.items() if door in field.doors}

    def extend(command: Callable[Concatenate[SamplingParams, P], None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in taken}
            command(_sampling({name: value for name, value in values.items() if value is not None}), **given)  # type: ignore[call-arg]

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        flags = [_parameter(field) for field in taken.values()]
        # typer reads the signature and the annotations.
        run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*own, *flags)}
        return run

    return extend


def _parameter(field: SamplingField) -> inspect.Parameter:
    flag = f"--{field.name.replace('_', '-')}"
    kind = _TYPES[field.kind]
    annotation: Any = Annotated[kind | None, typer.Option(flag, help=_help(field))]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(field: SamplingField) -> str:
    text = field.meaning[0].upper() + field.meaning[1:]
    if field.bounds is not None:
        text += f": {field.bounds.text}"
    if field.kind is Kind.TEXTS:
        text += "; may be repeated"
    default = field.unset
    if Door.GENERATION_CONFIG in field.doors:
        default = f"the model's own, else {field.default:g}"
    return f"{text}. Default: {default}." if default else f"{text}."


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Builds the parameters from the flags that are given.

    Raises:
        BadParameter: a value is out of range.
    """
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        hint = f"--{error.field.replace('_', '-')}"
        raise typer.BadParameter(
            f"{error.value} is not allowed; allowed: {', '.join(error.allowed)}", param_hint=hint
        ) from None
