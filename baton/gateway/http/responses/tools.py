"""Models of the tools in a body of `POST /v1/responses`, and of the choice among them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field

from baton.gateway.http.checking import Items, JsonObject, Model, by_type, tag, unsupported

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
Ignored = Any

# Tools that OpenAI runs itself. This server runs none, so the model does not see them.
HOSTED = frozenset(
    {
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
        "code_interpreter", "image_generation", "mcp", "computer", "computer_use", "computer_use_preview",
        "programmatic_tool_calling",
    }
)  # fmt: skip


_NOTHING_ALIKE: Mapping[str, str] = MappingProxyType({})


def by_type_alike(alike: Mapping[str, str] = _NOTHING_ALIKE, default: str | None = None) -> Discriminator:
    """Chooses an object's shape by its `type`; the types in `alike` have the shape of another one."""

    def choose(value: object) -> str | None:
        found = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"~{alike.get(found, found)}" if isinstance(found, str) else None

    return Discriminator(choose)


class FunctionTool(Model):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    output_schema: JsonObject | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: bool | None = None  # no effect: the model sees every tool
    async_: Annotated[None, unsupported("leave it out", False)] = Field(default=None, alias="async")


class FreeText(Model):
    type: Literal["text"]


class GrammarText(Model):
    """The language of a custom tool's input."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class CustomTool(Model):
    """A tool of the client whose input is a text instead of JSON."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[Annotated[FreeText, tag("text")] | Annotated[GrammarText, tag("grammar")], by_type()] | None = (
        None
    )
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: bool | None = None
    async_: Annotated[None, unsupported("leave it out", False)] = Field(default=None, alias="async")


class NamespaceTool(Model):
    """Functions and custom tools that share a namespace."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Items[Annotated[Annotated[FunctionTool, tag("function")] | Annotated[CustomTool, tag("custom")], by_type()]]


class LocalShellTool(Model):
    type: Literal["local_shell"]


class ShellTool(Model):
    type: Literal["shell"]
    environment: JsonObject | None = None
    allowed_callers: Items[Literal["direct"]] | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether the commands run in a container of OpenAI's."""
        return self.environment is not None and self.environment.get("type", "local") != "local"


class ApplyPatchTool(Model):
    type: Literal["apply_patch"]
    allowed_callers: Items[Literal["direct"]] | None = None


class ToolSearchTool(Model):
    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: JsonObject | None = None


class HostedTool(BaseModel):
    """A tool that runs at OpenAI. Its other fields have no effect here, whatever they are."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: str


_HOSTED_ALIKE = MappingProxyType(dict.fromkeys(HOSTED, "web_search"))

Tool = Annotated[
    Annotated[FunctionTool, tag("function")]
    | Annotated[CustomTool, tag("custom")]
    | Annotated[NamespaceTool, tag("namespace")]
    | Annotated[LocalShellTool, tag("local_shell")]
    | Annotated[ShellTool, tag("shell")]
    | Annotated[ApplyPatchTool, tag("apply_patch")]
    | Annotated[ToolSearchTool, tag("tool_search")]
    | Annotated[HostedTool, tag("web_search")],
    by_type_alike(_HOSTED_ALIKE),
]


class ChosenTool(Model):
    """A choice of one function or custom tool."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class ClientToolChoice(Model):
    """A choice of a tool that is named by its type."""

    type: Literal["local_shell", "shell", "apply_patch", "tool_search"]


_CHOICES_ALIKE = MappingProxyType(
    {"custom": "function"} | dict.fromkeys(("local_shell", "apply_patch", "tool_search"), "shell")
)


class AllowedTools(Model):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        Items[
            Annotated[
                Annotated[ChosenTool, tag("function")]
                | Annotated[ClientToolChoice, tag("shell")]
                | Annotated[HostedTool, tag("web_search")],
                by_type_alike(_CHOICES_ALIKE | _HOSTED_ALIKE),
            ]
        ],
        Field(min_length=1),
    ]


def _choice_shape(value: object) -> str | None:
    if isinstance(value, str):
        return "~mode"
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{_CHOICES_ALIKE.get(found, found)}" if isinstance(found, str) else None


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], tag("mode")]
    | Annotated[ChosenTool, tag("function")]
    | Annotated[ClientToolChoice, tag("shell")]
    | Annotated[AllowedTools, tag("allowed_tools")],
    Discriminator(_choice_shape),
]
