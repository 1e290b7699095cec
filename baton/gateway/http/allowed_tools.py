"""A chat's choice among some of its tools. The model sees no other tool. Pure."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.gateway.http.checking import Items, Model, by_type, tag
from baton.gateway.http.field_errors import short
from baton.gateway.text.chat.json_request import TOOLS_MAX

_NAMED_MAX = 8  # unknown tools in an error


class ChatToolName(Model):
    name: str


class ChatFunctionChoice(Model):
    type: Literal["function"]
    function: ChatToolName

    @property
    def name(self) -> str:
        return self.function.name


class ChatCustomChoice(Model):
    type: Literal["custom"]
    custom: ChatToolName

    @property
    def name(self) -> str:
        return self.custom.name


class ChatAllowedList(Model):
    """The allowed tools, and whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        Items[
            Annotated[
                Annotated[ChatFunctionChoice, tag("function")] | Annotated[ChatCustomChoice, tag("custom")], by_type()
            ]
        ],
        Field(min_length=1, max_length=TOOLS_MAX),
    ]


class ChatAllowedTools(Model):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ChatAllowedList

    @property
    def mode(self) -> str:
        return self.allowed_tools.mode

    def names(self, given: Sequence[tuple[str, str]]) -> frozenset[str]:
        """Returns the names of the allowed tools.

        Args:
            given: types and names of the request's tools.

        Raises:
            InvalidRequest: a tool is not there, or has the other type.
        """
        known = frozenset(given)
        chosen = [(tool.type, tool.name) for tool in self.allowed_tools.tools]
        if unknown := [tool for tool in chosen if tool not in known]:
            where = f"tool_choice.allowed_tools.tools[{chosen.index(unknown[0])}].{unknown[0][0]}.name"
            names = ", ".join(f"{kind} {short(name)}" for kind, name in unknown[:_NAMED_MAX])
            raise InvalidRequest(
                f"tool_choice allows tools that are not in `tools`: {names}",
                field=where,
                value=unknown[0][1],
                allowed=tuple(name for kind, name in given if kind == unknown[0][0]),
                cure="give them in `tools`",
            )
        return frozenset(name for _, name in chosen)
