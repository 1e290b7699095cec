"""The tools of one request: the functions that the model sees, and which tool of the client's each of them stands for.
Pure.

A template knows functions only, with a name and JSON arguments. So a custom tool is shown as a function with one text,
a tool of a namespace under a name with both parts, and a tool without a name under its type.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar
from baton.gateway.http.custom_input import GRAMMAR_KINDS, text_function
from baton.gateway.http.responses.client_tools import CLIENT_TOOLS
from baton.gateway.http.responses.tools import (
    AllowedTools,
    ChosenTool,
    ClientToolChoice,
    CustomTool,
    FunctionTool,
    GrammarText,
    HostedTool,
    NamespaceTool,
    ShellTool,
    Tool,
    ToolSearchTool,
)

_NO_NAMESPACE = (None, "", "functions")  # Codex's own name of none is the last one
_JOINT = "__"  # between namespace and name, as in the names of MCP tools

Json = dict[str, Any]


@dataclass(frozen=True)
class ShownTool:
    """One tool.

    Attributes:
        kind: "function", "custom", or the type of a tool without a name.
        namespace: as the client gave it; None: none.
        function: the function that the model sees, in the shape of chat completions.
        grammar: the language of a custom tool's input; None: any text.
        where: the tool's place in the body, for errors.
    """

    kind: str
    name: str
    namespace: str | None
    function: Json
    grammar: Grammar | None = None
    where: str = ""

    @property
    def shown_name(self) -> str:
        return str(self.function["name"])

    def is_same(self, other: "ShownTool") -> bool:
        """Whether both are the client's same tool, in one definition or in two."""
        mine, theirs = (None if each.namespace in _NO_NAMESPACE else each.namespace for each in (self, other))
        return (self.kind, self.name, mine) == (other.kind, other.name, theirs)


@dataclass
class ToolTable:
    """The tools by the names under which the model sees them, in the client's order.

    Attributes:
        left_out: types of the tools that run at OpenAI, so that the model does not see them.
    """

    tools: dict[str, ShownTool] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)

    def add(self, tools: Iterable[Tool], where: str) -> None:
        """Adds tools. A tool that is there already is replaced.

        Args:
            where: the list's place in the body, such as `tools`.

        Raises:
            InvalidRequest: the model would see two tools under one name.
        """
        for index, tool in enumerate(tools):
            self._add(tool, f"{where}[{index}]")

    def find(self, shown_name: str) -> ShownTool | None:
        return self.tools.get(shown_name)

    def functions(self) -> list[Json]:
        return [{"type": "function", "function": tool.function} for tool in self.tools.values()]

    def chosen(self, choice: ChosenTool | ClientToolChoice, where: str = "tool_choice") -> ShownTool:
        """Returns the tool that a choice names.

        Raises:
            InvalidRequest: there is none.
        """
        kind, name, field_name = str(choice.type), str(choice.type), f"{where}.type"
        if isinstance(choice, ChosenTool):
            name, field_name = shown_name(choice.name, choice.namespace), f"{where}.name"
        found = self.tools.get(name)
        if found is None or found.kind != kind:
            names = tuple(tool.shown_name for tool in self.tools.values() if tool.kind == kind)
            raise InvalidRequest(
                f"{field_name} names no tool of this type",
                field=field_name,
                value=name,
                allowed=names,
                cure="add it to `tools`",
            )
        return found

    def allowed(self, choice: AllowedTools) -> "ToolTable":
        """Returns the table with only the allowed tools.

        Raises:
            InvalidRequest: an allowed tool is not there.
        """
        kept = {
            self.chosen(each, f"tool_choice.tools[{index}]").shown_name
            for index, each in enumerate(choice.tools)
            if not isinstance(each, HostedTool)
        }
        tools = {name: tool for name, tool in self.tools.items() if name in kept}
        return ToolTable(tools, self.left_out)

    def _add(self, tool: Tool, where: str) -> None:
        match tool:
            case FunctionTool() | CustomTool():
                self._put(_shown(tool, None, where))
            case NamespaceTool():
                for index, each in enumerate(tool.tools):
                    self._put(_shown(each, tool, f"{where}.tools[{index}]"))
            case HostedTool():
                self.left_out[tool.type] = None
            case ShellTool(is_hosted=True):
                self.left_out["shell in a container"] = None
            case ToolSearchTool() if tool.execution != "client":
                self.left_out["tool_search at OpenAI"] = None
            case _:
                self._put(_client_tool(tool, where))

    def _put(self, tool: ShownTool) -> None:
        other = self.tools.get(tool.shown_name)
        if other is not None and not tool.is_same(other):
            raise InvalidRequest(
                f"{tool.where} and {other.where} would both be {tool.shown_name!r} to the model",
                field=tool.where,
                value=tool.shown_name,
                cure="rename one of them",
            )
        self.tools[tool.shown_name] = tool


def shown_name(name: str, namespace: str | None) -> str:
    """Returns the name under which the model sees a tool of this namespace."""
    if namespace in _NO_NAMESPACE:
        return name
    return f"{str(namespace).removesuffix(_JOINT)}{_JOINT}{name}"


def _shown(tool: FunctionTool | CustomTool, space: NamespaceTool | None, where: str) -> ShownTool:
    namespace = None if space is None else space.name
    name = shown_name(tool.name, namespace)
    if isinstance(tool, FunctionTool):
        return ShownTool("function", tool.name, namespace, _function(name, tool), where=where)
    grammar = tool.format if isinstance(tool.format, GrammarText) else None
    constraint = None if grammar is None else Grammar(GRAMMAR_KINDS[grammar.syntax], grammar.definition)
    function = text_function(name, tool.description, constraint)
    return ShownTool("custom", tool.name, namespace, function, constraint, where)


def _function(name: str, tool: FunctionTool) -> Json:
    function: Json = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function


def _client_tool(tool: Tool, where: str) -> ShownTool:
    about = CLIENT_TOOLS[tool.type]
    description, parameters = about.description, about.parameters
    if isinstance(tool, ToolSearchTool):
        description, parameters = tool.description or description, tool.parameters or parameters
    function = {"name": tool.type, "description": description, "parameters": parameters}
    return ShownTool(tool.type, tool.type, None, function, where=where)
