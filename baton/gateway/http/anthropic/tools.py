"""Models of the tools of a request: the client's own, those whose schema Anthropic defines and the client runs, and
those that Anthropic's servers run.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from baton.gateway.http.anthropic.blocks import CacheControl, OpenObject
from baton.gateway.http.checking import Items, JsonObject, Model, by_type, tag, unsupported

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]

# Beginnings of the types of a kind; the rest is a date.
_RUN_BY_CLIENT = ("bash_", "text_editor_", "memory_")
_RUN_BY_SERVER = (
    "web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset",
)  # fmt: skip
_NEED_PICTURES = ("computer_", "browser_")
_NO_PICTURES = "its results are pictures, and the model reads text only: leave it out"


_ALLOWED_CLIENT = "|".join(f"{each}*" for each in _RUN_BY_CLIENT)
_ALLOWED_SERVER = "|".join(f"{each}*" if each.endswith("_") else each for each in _RUN_BY_SERVER)
_REFUSED = "|"


def _kind(type: str) -> str:
    """Returns the tag of a tool's shape."""
    if type.startswith(_RUN_BY_CLIENT):
        return _ALLOWED_CLIENT
    if type.startswith(_RUN_BY_SERVER):
        return _ALLOWED_SERVER
    return _REFUSED if type.startswith(_NEED_PICTURES) else type


class OwnTool(Model):
    """A tool that the client defines and runs.

    Attributes:
        defer_loading: the model sees the tool only once the conversation names it.
    """

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    input_examples: Items[JsonObject] | None = None
    allowed_callers: Items[str] | None = None
    defer_loading: bool | None = None


class ClientTool(Model):
    """A tool whose schema Anthropic defines, and that the client runs: bash, text editor or memory."""

    type: str
    name: ToolName
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: Items[JsonObject] | None = None
    allowed_callers: Items[str] | None = None
    defer_loading: bool | None = None
    max_characters: int | None = None


class ServerTool(OpenObject):
    """A tool that Anthropic's servers run. It is left out of the prompt."""

    type: str
    name: str = ""


class PictureTool(OpenObject):
    """A tool whose results are pictures. It is refused."""

    type: Annotated[None, unsupported(_NO_PICTURES)]


Tool = Annotated[
    Annotated[OwnTool, tag("custom")]
    | Annotated[ClientTool, tag(_ALLOWED_CLIENT)]
    | Annotated[ServerTool, tag(_ALLOWED_SERVER)]
    | Annotated[PictureTool, tag(_REFUSED)],
    by_type("custom", family=_kind),
]


class Auto(Model):
    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyTool(Model):
    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class OneTool(Model):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoTool(Model):
    type: Literal["none"]
    disable_parallel_tool_use: Any = None


ToolChoice = Annotated[
    Annotated[Auto, tag("auto")]
    | Annotated[AnyTool, tag("any")]
    | Annotated[OneTool, tag("tool")]
    | Annotated[NoTool, tag("none")],
    by_type(),
]
