"""Models of the body of `POST /v1/responses`.

Parameters that this server does not support are declared too, so that an error can name them.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field

from baton.core.sampling_field import Door
from baton.gateway.http.checking import (
    TEXT_OR_LIST,
    U32,
    Items,
    JsonObject,
    Model,
    PositiveU32,
    at_most,
    by_type,
    tag,
    unsupported,
)
from baton.gateway.http.common_fields import CommonFields
from baton.gateway.http.sampling import takes_sampling

_STATELESS = "this server stores no answers: send the earlier items in `input`"

_METADATA_MAX = 1024  # keys; OpenAI takes 16

Status = Literal["in_progress", "completed", "incomplete"]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
Ignored = Any


class InputText(Model):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Ignored = None


class OutputText(Model):
    type: Literal["output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class RefusalPart(Model):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    Annotated[InputText, tag("input_text")]
    | Annotated[OutputText, tag("output_text")]
    | Annotated[RefusalPart, tag("refusal")],
    by_type(),
]
TextOrParts = Annotated[Annotated[str, tag("text")] | Annotated[Items[Part], tag("list")], TEXT_OR_LIST]


class Message(Model):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Model):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Ignored = None
    namespace: Ignored = None
    async_: Annotated[None, unsupported("leave it out", False)] = Field(default=None, alias="async")


class FunctionCallOutput(Model):
    type: Literal["function_call_output"]
    call_id: str
    output: TextOrParts
    id: str | None = None
    status: Status | None = None
    name: Ignored = None
    caller: Ignored = None
    namespace: Ignored = None


class SummaryText(Model):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Model):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(Model):
    """Reasoning of an earlier turn. Only its author can read `encrypted_content`, so Baton leaves it out."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Items[SummaryText] = Field(default_factory=list)
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


Item = Annotated[
    Annotated[Message, tag("message")]
    | Annotated[FunctionCall, tag("function_call")]
    | Annotated[FunctionCallOutput, tag("function_call_output")]
    | Annotated[Reasoning, tag("reasoning")],
    by_type(default="message"),
]


class FunctionTool(Model):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    output_schema: JsonObject | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Annotated[None, unsupported("every tool is part of the prompt", False)] = None
    async_: Annotated[None, unsupported("leave it out", False)] = Field(default=None, alias="async")


class NamedFunction(Model):
    type: Literal["function"]
    name: ToolName


class AllowedTools(Model):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedFunction], Field(min_length=1)]


def _choice_shape(value: object) -> str | None:
    if isinstance(value, str):
        return "~mode"
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{found}" if isinstance(found, str) else None


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], tag("mode")]
    | Annotated[NamedFunction, tag("function")]
    | Annotated[AllowedTools, tag("allowed_tools")],
    Discriminator(_choice_shape),
]


class TextFormat(Model):
    type: Literal["text"]


class JsonObjectFormat(Model):
    type: Literal["json_object"]


class JsonSchemaFormat(Model):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    Annotated[TextFormat, tag("text")]
    | Annotated[JsonObjectFormat, tag("json_object")]
    | Annotated[JsonSchemaFormat, tag("json_schema")],
    by_type(),
]


class TextOptions(Model):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Model):
    """Options of reasoning. `summary` has no effect, because the answer contains the reasoning itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Annotated[None, unsupported("leave it out", "standard")] = None
    context: Annotated[None, unsupported("the chat template decides; leave it out", "auto")] = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(_METADATA_MAX)
]


class StreamOptions(Model):
    include_obfuscation: bool | None = None  # no effect


@takes_sampling(Door.RESPONSES)
class ResponsesRequest(CommonFields):
    """Body of `POST /v1/responses`."""

    model: str = ""
    input: Annotated[
        Annotated[str, tag("text")] | Annotated[Annotated[Items[Item], Field(min_length=1)], tag("list")], TEXT_OR_LIST
    ]
    instructions: str | None = None
    max_output_tokens: PositiveU32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    max_tool_calls: U32 | None = None  # no effect: it limits tools that a server runs, and this one runs none
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: Ignored = None
    store: Annotated[None, unsupported("this server stores no answers: send `store` false", False)] = None
    previous_response_id: Annotated[None, unsupported(_STATELESS)] = None
    conversation: Annotated[None, unsupported(_STATELESS)] = None
    background: Annotated[None, unsupported("this server stores no answers: use `stream`", False)] = None
    background_options: Annotated[None, unsupported("this server stores no answers: use `stream`")] = None
    prompt: Annotated[None, unsupported("this server stores no prompts: send `instructions` and `input`")] = None
    context_management: Annotated[None, unsupported("send the items that are wanted")] = None
    moderation: Annotated[None, unsupported("leave it out")] = None
    image: Annotated[None, unsupported("the model reads text only")] = None
    access_programs: Annotated[None, unsupported("leave it out")] = None
