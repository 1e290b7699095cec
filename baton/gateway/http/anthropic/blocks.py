"""Models of messages and of their content blocks.

Blocks that only Anthropic's own servers write are declared by their types alone, and are left out of the prompt. Blocks
that are not text are declared too, so that an error can name them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.gateway.http.checking import (
    TEXT_OR_LIST,
    Items,
    JsonObject,
    Model,
    by_shape,
    by_type,
    tag,
    unsupported,
)

Ignored = Any
CallId = Annotated[str, Field(min_length=1)]
Effort = Literal["low", "medium", "high", "xhigh", "max"]

_TEXT_ONLY = "the model reads text only: send the content as text, or leave it out"
_DOCUMENT_TEXT = "the model reads text only: send the document's text as a source of type text"

_REFUSED = "|"  # a tag that no error lists as allowed

# Types that share a shape, by their tag: the name of one of them, if errors list it as allowed.
_FAMILIES: Mapping[str, Sequence[str]] = {
    _REFUSED: ("image", "browser_state"),
    "server_tool_use": (
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "mcp_tool_listing",
        "container_upload",
        "connector_text",
        "fallback",
        "tool_removal",
    ),
}
_TAGS = {kind: family for family, kinds in _FAMILIES.items() for kind in kinds}


def _family(kind: str) -> str:
    return _TAGS.get(kind, kind)


class OpenObject(BaseModel):
    """A JSON object that may have further fields, which nothing reads."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class CacheControl(Model):
    """How long stores outside of the caches keep the conversation. In the caches, every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(Model):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Ignored = None


class ImageBlock(OpenObject):
    """A picture, or a browser's state with one. It is refused."""

    type: Annotated[None, unsupported(_TEXT_ONLY)]


TextOrTexts = Annotated[
    Annotated[str, tag("text")]
    | Annotated[Items[Annotated[Annotated[TextBlock, tag("text")], by_type()]], tag("list")],
    TEXT_OR_LIST,
]
TextOrPictures = Annotated[
    Annotated[str, tag("text")]
    | Annotated[
        Items[
            Annotated[Annotated[TextBlock, tag("text")] | Annotated[ImageBlock, tag(_REFUSED)], by_type(family=_family)]
        ],
        tag("list"),
    ],
    TEXT_OR_LIST,
]


class PlainText(Model):
    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None


class DocumentContent(Model):
    type: Literal["content"]
    content: TextOrPictures


class DocumentFile(OpenObject):
    """A PDF or a stored file. It is refused."""

    type: Annotated[None, unsupported(_DOCUMENT_TEXT)]


def _source(kind: str) -> str:
    return _REFUSED if kind in ("base64", "url", "file") else kind


class DocumentBlock(Model):
    """A document that is given as text."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainText, tag("text")]
        | Annotated[DocumentContent, tag("content")]
        | Annotated[DocumentFile, tag(_REFUSED)],
        by_type(family=_source),
    ]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None
    citations: Ignored = None


class SearchResultBlock(Model):
    """A text that the client found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]
    cache_control: CacheControl | None = None
    citations: Ignored = None


class ToolReference(Model):
    """Names a tool with `defer_loading`, which the model sees from then on."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Model):
    """Reasoning of an earlier turn. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = None


class RedactedThinking(Model):
    """Encrypted reasoning, which only its author can read. It is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: CacheControl | None = None


class CompactionBlock(OpenObject):
    """A summary of earlier messages; None: the summary failed."""

    type: Literal["compaction"]
    content: str | None = None


class ToolUse(Model):
    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(min_length=1)]
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: Ignored = None
    toolset_name: Ignored = None


class ResultPicture(OpenObject):
    """A picture in a tool's result. A text takes its place: an agent that was refused here could never go on."""

    type: str

    @property
    def text(self) -> str:
        return f"[{self.type} left out: the model reads text only]"


ResultBlock = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[DocumentBlock, tag("document")]
    | Annotated[SearchResultBlock, tag("search_result")]
    | Annotated[ToolReference, tag("tool_reference")]
    | Annotated[ResultPicture, tag(_REFUSED)],
    by_type(family=_family),
]


class ToolResult(Model):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: (
        Annotated[Annotated[str, tag("text")] | Annotated[Items[ResultBlock], tag("list")], TEXT_OR_LIST] | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Ignored = None


class FoundTools(OpenObject):
    tool_references: Items[ToolReference] = Field(default_factory=list)


class ToolSearchResult(OpenObject):
    """Tools that Anthropic's tool search found in an earlier turn."""

    type: Literal["tool_search_tool_result"]
    content: FoundTools


class AddedTool(OpenObject):
    name: str = ""


class ToolAddition(OpenObject):
    """Names a tool with `defer_loading`, which the model sees from then on."""

    type: Literal["tool_addition"]
    tool: AddedTool


class ServerBlock(OpenObject):
    """A block about work of Anthropic's servers. It is left out of the prompt."""

    type: str


Block = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[DocumentBlock, tag("document")]
    | Annotated[SearchResultBlock, tag("search_result")]
    | Annotated[ThinkingBlock, tag("thinking")]
    | Annotated[RedactedThinking, tag("redacted_thinking")]
    | Annotated[CompactionBlock, tag("compaction")]
    | Annotated[ToolUse, tag("tool_use")]
    | Annotated[ToolResult, tag("tool_result")]
    | Annotated[ToolSearchResult, tag("tool_search_tool_result")]
    | Annotated[ToolAddition, tag("tool_addition")]
    | Annotated[ServerBlock, tag("server_tool_use")]
    | Annotated[ImageBlock, tag(_REFUSED)],
    by_type(family=_family),
]
TextOrBlocks = Annotated[Annotated[str, tag("text")] | Annotated[Items[Block], tag("list")], TEXT_OR_LIST]


class Message(Model):
    role: Literal["user", "assistant"]
    content: TextOrBlocks


class SystemOutput(Model):
    effort: Effort | None = None


class SystemMessage(Model):
    """An instruction in the middle of the conversation.

    Attributes:
        clear_at: `next_user_message`: the instruction goes when a later message of the user exists.
    """

    role: Literal["system"]
    content: TextOrBlocks = ""
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: SystemOutput | None = None


def _speaker(value: object) -> str | None:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    if role == "system":
        return "system"
    return "turn" if isinstance(value, dict | Message) else None


Turn = Annotated[
    Annotated[Message, tag("turn")] | Annotated[SystemMessage, tag("system")], by_shape(_speaker, "an object")
]
