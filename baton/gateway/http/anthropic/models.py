"""Models of the bodies of `POST /v1/messages` and `/v1/messages/count_tokens`.

Parameters that this server does not support are declared too, so that an error can name them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from baton.core.sampling_field import Door
from baton.gateway.http.checking import TEXT_OR_LIST, Items, JsonObject, Model, PositiveU32, by_type, tag, unsupported
from baton.gateway.http.common_fields import CommonFields
from baton.gateway.http.sampling import takes_sampling

THINKING_TOKENS_MIN = 1024

Ignored = Any
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1)]


class CacheControl(Model):
    """Accepted without effect, because every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Model):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Ignored = None


TextOrTexts = Annotated[
    Annotated[str, tag("text")]
    | Annotated[Items[Annotated[Annotated[TextBlock, tag("text")], by_type()]], tag("list")],
    TEXT_OR_LIST,
]


class Thinking(Model):
    """Reasoning of an earlier turn. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(Model):
    """Encrypted reasoning, which only its author can read. Baton leaves it out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUse(Model):
    type: Literal["tool_use"]
    id: CallId
    name: Annotated[str, Field(min_length=1)]
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: Ignored = None
    toolset_name: Ignored = None


class ToolResult(Model):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOrTexts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Ignored = None


Block = Annotated[
    Annotated[TextBlock, tag("text")]
    | Annotated[Thinking, tag("thinking")]
    | Annotated[RedactedThinking, tag("redacted_thinking")]
    | Annotated[ToolUse, tag("tool_use")]
    | Annotated[ToolResult, tag("tool_result")],
    by_type(),
]
TextOrBlocks = Annotated[Annotated[str, tag("text")] | Annotated[Items[Block], tag("list")], TEXT_OR_LIST]


class Message(Model):
    role: Literal["user", "assistant", "system"]
    content: TextOrBlocks


class Tool(Model):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    input_examples: Items[JsonObject] | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Annotated[None, unsupported("every tool is part of the prompt", False)] = None


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


ToolChoice = Annotated[
    Annotated[Auto, tag("auto")]
    | Annotated[AnyTool, tag("any")]
    | Annotated[OneTool, tag("tool")]
    | Annotated[NoTool, tag("none")],
    by_type(),
]

Display = Literal["summarized", "omitted"]


class ThinkingEnabled(Model):
    """Reasoning with a budget. The budget has no effect: the model itself ends its reasoning."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=THINKING_TOKENS_MIN)]
    display: Display | None = None


class ThinkingAdaptive(Model):
    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingDisabled(Model):
    type: Literal["disabled"]


ThinkingConfig = Annotated[
    Annotated[ThinkingEnabled, tag("enabled")]
    | Annotated[ThinkingAdaptive, tag("adaptive")]
    | Annotated[ThinkingDisabled, tag("disabled")],
    by_type(),
]


class JsonFormat(Model):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Model):
    user_id: str | None = None


@takes_sampling(Door.MESSAGES)
class CountTokensRequest(CommonFields):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str = ""
    messages: Annotated[Items[Message], Field(min_length=1)]
    system: TextOrTexts | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Annotated[None, unsupported("there is one speed: leave it out", "standard")] = None
    context_management: Annotated[None, unsupported("send the messages that are wanted")] = None
    mcp_servers: Annotated[None, unsupported("give tools, and run them yourself", [])] = None


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: PositiveU32
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    container: Annotated[None, unsupported("no code is run here")] = None
    diagnostics: Annotated[None, unsupported("leave it out")] = None
