"""Models of the body of `POST /v1/responses`.

Parameters that this server does not support are declared too, so that an error can name them.
"""

from typing import Annotated, Literal

from pydantic import Field

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
from baton.gateway.http.responses.items import Item
from baton.gateway.http.responses.tools import Ignored, Tool, ToolChoice
from baton.gateway.http.sampling import takes_sampling

_METADATA_MAX = 1024  # keys; OpenAI takes 16


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
    context: Literal["auto", "current_turn", "all_turns"] | None = None  # no effect: the chat template decides


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(_METADATA_MAX)
]


LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# The others are about items that this server never has.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponseStreamOptions(Model):
    """Options without effect."""

    include_obfuscation: bool | None = None
    reasoning_summary_delivery: str | None = None


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
    stream_options: ResponseStreamOptions | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Items[Includable] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    max_tool_calls: U32 | None = None  # no effect: it limits tools that a server runs, and this one runs none
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: Ignored = None
    client_metadata: Ignored = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1)] | None = None
    conversation: Annotated[None, unsupported("use `previous_response_id`, or send the earlier items in `input`")] = (
        None
    )
    background: Annotated[None, unsupported("no answer runs in the background: use `stream`", False)] = None
    background_options: Annotated[None, unsupported("no answer runs in the background: use `stream`")] = None
    prompt: Annotated[None, unsupported("this server stores no prompts: send `instructions` and `input`")] = None
    context_management: Annotated[None, unsupported("send the items that are wanted")] = None
    moderation: Annotated[None, unsupported("leave it out")] = None
    image: Annotated[None, unsupported("the model reads text only")] = None
    access_programs: Ignored = None
