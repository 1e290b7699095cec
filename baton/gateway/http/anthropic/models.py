"""Models of the bodies of `POST /v1/messages` and `/v1/messages/count_tokens`.

Parameters that this server does not support are declared too, so that an error can name them. `no_effect` says which
accepted parts of a request have no effect.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from baton.core.sampling_field import Door
from baton.gateway.http.anthropic.blocks import CacheControl, Effort, OpenObject, TextOrTexts, Turn
from baton.gateway.http.anthropic.tools import Tool, ToolChoice
from baton.gateway.http.checking import Items, JsonObject, Model, by_type, tag, unsupported
from baton.gateway.http.common_fields import CommonFields
from baton.gateway.http.sampling import takes_sampling

THINKING_TOKENS_MIN = 1024

Ignored = Any
MaxTokens = Annotated[int, Field(ge=0, lt=1 << 32)]
Display = Literal["summarized", "omitted", "updates"]


class ThinkingEnabled(Model):
    """Reasoning with a budget. The budget has no effect: the model itself ends its reasoning."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=THINKING_TOKENS_MIN)]
    display: Display | None = None
    block_binding: Ignored = None


class ThinkingAdaptive(Model):
    type: Literal["adaptive"]
    display: Display | None = None
    block_binding: Ignored = None


class ThinkingDisabled(Model):
    """No reasoning. `between_tools` allows short notes between tool calls, which is no more than a model may write."""

    type: Literal["disabled", "between_tools"]


def _thinking(type: str) -> str:
    return "disabled" if type == "between_tools" else type


ThinkingConfig = Annotated[
    Annotated[ThinkingEnabled, tag("enabled")]
    | Annotated[ThinkingAdaptive, tag("adaptive")]
    | Annotated[ThinkingDisabled, tag("disabled")],
    by_type(family=_thinking),
]


class JsonFormat(Model):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Model):
    effort: Effort | None = None
    format: JsonFormat | None = None
    task_budget: JsonObject | None = None


class Metadata(Model):
    user_id: str | None = None


class ContextEdit(OpenObject):
    """A change to the conversation that Anthropic's servers would make. Accepted without effect."""

    type: str
    keep: Any = None


class ContextManagement(OpenObject):
    edits: Items[ContextEdit] = Field(default_factory=list)


class McpServer(OpenObject):
    """A server that Anthropic's servers would ask for tools. Accepted without effect."""

    name: str = ""


@takes_sampling(Door.MESSAGES)
class CountTokensRequest(CommonFields):
    """Body of `POST /v1/messages/count_tokens`, which may be that of `POST /v1/messages`."""

    model: str = ""
    messages: Annotated[Items[Turn], Field(min_length=1)]
    system: TextOrTexts | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="older name of `output_config.format`")
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = Field(None, description="accepted: no message is edited")
    mcp_servers: Items[McpServer] | None = Field(None, description="accepted: no server is asked for tools")
    speed: Literal["standard", "fast"] | None = Field(None, description="accepted: there is one speed")
    container: Ignored = Field(None, description="accepted: no code is run here")
    diagnostics: JsonObject | None = Field(None, description="accepted: nothing is diagnosed")
    fallbacks: Ignored = Field(None, description="accepted: there is no other model")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    billing_policy: Ignored = None
    fallback_credit_token: Ignored = None
    betas: Items[str] | None = None
    anthropic_beta: Items[str] | None = None
    anthropic_version: str | None = None
    compaction: Annotated[None, unsupported("ask the model for a summary")] = None
    thread: Annotated[None, unsupported("conversations of this endpoint are not stored: send all messages")] = None


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: MaxTokens = Field(description="0: compute the prompt for prefix caches, and answer without text")
