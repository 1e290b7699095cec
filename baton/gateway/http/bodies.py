"""Models of the bodies of OpenAI's endpoints, with vLLM's additional fields.

They check types and combinations of fields. `baton.gateway.serving` checks the ranges of numbers for all APIs.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from baton.core.sampling import MAX_LOGPROBS
from baton.core.sampling_field import Door
from baton.gateway.http.allowed_tools import ChatAllowedTools
from baton.gateway.http.baton_options import BatonOptions
from baton.gateway.http.checking import TEXT_OR_OBJECT, Items, Model, by_shape, tag
from baton.gateway.http.client_fields import IGNORED, ChatClientFields, ClientFields
from baton.gateway.http.custom_tools import ChatTool
from baton.gateway.http.sampling import takes_sampling

Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[Items[Uint32], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
# -1 is no limit, as in llama.cpp, LM Studio and LangChain.
Limit = Annotated[
    Annotated[int, Field(ge=1, lt=1 << 32)] | None, BeforeValidator(lambda value: None if value == -1 else value)
]
_OUTPUTS_MAX = 128
_PROMPTS_MAX = 1024

TextOrObject = Annotated[Annotated[str, tag("text")] | Annotated[dict[str, Any], tag("object")], TEXT_OR_OBJECT]


def _choice_shape(value: object) -> str | None:
    if isinstance(value, dict):
        return "allowed_tools" if value.get("type") == "allowed_tools" else "object"
    return "text" if isinstance(value, str) else None


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], tag("text")]
    | Annotated[dict[str, Any], tag("object")]
    | Annotated[ChatAllowedTools, tag("allowed_tools")],
    by_shape(_choice_shape, "a string or an object"),
]


def prompt_shape(value: object) -> str | None:
    """Returns the shape of a prompt's first element, so that an error names the first element that differs."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[Text, tag("text")]
    | Annotated[Items[Text], Field(max_length=_PROMPTS_MAX), tag("texts")]
    | Annotated[TokenIds, tag("ids")]
    | Annotated[Items[TokenIds], Field(max_length=_PROMPTS_MAX), tag("lists")],
    by_shape(prompt_shape, "a string, token ids, or a list of either"),
]


class StreamOptions(Model):
    """Additional content of a stream."""

    include_usage: bool = Field(False, description="add a last chunk with the usage")
    continuous_usage_stats: bool = Field(False, description="add the usage so far to every chunk")
    include_obfuscation: bool | None = Field(None, description=IGNORED)


class JsonSchemaFormat(Model):
    """A named JSON Schema."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description=f"{IGNORED}: a schema is always obeyed")


class ResponseFormat(Model):
    """The constraint that the output must satisfy."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema")
        return self


class StructuredOutputs(Model):
    """The constraint that the output must satisfy, with vLLM's field names. Set at most one field."""

    json_: TextOrObject | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[Items[str], Field(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool | None = Field(None, description=IGNORED)
    disable_any_whitespace: bool | None = Field(None, description=IGNORED)


class GenerationBody(ClientFields):
    """Fields of all requests that generate. `takes_sampling` adds the sampling parameters."""

    model: str = Field("", description="default: the served model")
    stream: bool = Field(False, description="answer as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="what a stream contains besides")
    n: int = Field(1, ge=1, le=_OUTPUTS_MAX, description="outputs for each prompt")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    spaces_between_special_tokens: bool = Field(True, description="only true")
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, lt=1 << 32, description="keep this many tokens of the prompt's end"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="alternatives for each prompt token; not in a stream"
    )
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31, description="waiting requests with lower values go first")
    cache_salt: Text | None = Field(None, description="requests share cached prefixes only with the same salt")
    response_format: ResponseFormat | None = Field(None, description="what the output must be")
    structured_outputs: StructuredOutputs | None = Field(None, description="what the output must be, in vLLM's words")
    guided_json: TextOrObject | None = Field(None, description="older form of `structured_outputs.json`")
    guided_regex: Text | None = Field(None, description="older form of `structured_outputs.regex`")
    guided_choice: Annotated[Items[str], Field(min_length=1)] | None = Field(
        None, description="older form of `structured_outputs.choice`"
    )
    guided_grammar: Text | None = Field(None, description="older form of `structured_outputs.grammar`")
    guided_decoding_backend: str | None = Field(None, description=IGNORED)
    return_tokens_as_token_ids: bool = Field(False, description="in logprobs: token_id:N in place of a token's text")
    return_token_ids: bool = Field(False, description="add the token ids of the output")
    baton: BatonOptions = Field(BatonOptions(), description="options of this server only")
    user: str | None = Field(None, description=IGNORED)
    store: bool | None = Field(None, description=IGNORED)
    metadata: dict[str, Any] | None = Field(None, description=IGNORED)
    service_tier: str | None = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description="session, if `baton.session_id` gives none")
    prompt_cache_retention: str | None = Field(
        None, description="`24h` or `in_memory`: how long [stores](kept-kv.md#keep-times) keep the prompt's KV"
    )

    @model_validator(mode="after")
    def _is_possible(self) -> "GenerationBody":
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs and stream exclude each other")
        if not self.spaces_between_special_tokens:
            raise ValueError("spaces_between_special_tokens is false; allowed: true")
        return self

    @property
    def include_usage(self) -> bool:
        wanted = self.stream_options is not None and self.stream_options.include_usage
        return wanted or (self.usage is not None and self.usage.include)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


@takes_sampling(Door.CHAT)
class ChatBody(ChatClientFields, GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1, description="the conversation")]
    max_completion_tokens: Limit = Field(None, description="default, or -1: what the context leaves")
    max_tokens: Limit = Field(None, description="older name of max_completion_tokens")
    logprobs: bool = Field(False, description="whether to add logprobs")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives for each token")
    tools: Items[ChatTool] = Field([], description="functions and custom tools that the model may call")
    tool_choice: ToolChoice | None = Field(
        None, description="auto, none, required, one tool or `allowed_tools`; all but auto are enforced"
    )
    parallel_tool_calls: bool = Field(True, description="whether there may be several calls")
    reasoning_effort: str | None = Field(None, description="variable of the template; none: no reasoning")
    include_reasoning: bool = Field(True, description="whether the answer has the reasoning")
    chat_template: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] | None = Field(
        None, description="name of one of the checkpoint's templates"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="more variables of the template")
    documents: Items[dict[str, Any]] | None = Field(None, description="variable of the template")
    add_generation_prompt: bool | None = Field(
        None, description="write the beginning of the answer; default: unless the last message goes on"
    )
    continue_final_message: bool = Field(False, description="the output continues the last message")
    add_special_tokens: Literal[False] = Field(False, description="the template writes all special tokens itself")
    modalities: Items[Literal["text"]] | None = Field(None, description="only text")
    prediction: dict[str, Any] | None = Field(None, description=IGNORED)
    verbosity: str | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _is_possible_chat(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        return self

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning and not (self.reasoning is not None and self.reasoning.exclude)


@takes_sampling(Door.COMPLETIONS)
class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[Prompt, Field(description="a text, token ids, or a list of either")]
    max_tokens: Uint32 | None = Field(None, description="default: 16; 0 only with echo")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives for each token")
    echo: bool = Field(False, description="begin with the prompt")
    best_of: int | None = Field(
        None, ge=1, le=_OUTPUTS_MAX, description="draw so many outputs, return the `n` most probable; not with `stream`"
    )
    add_special_tokens: bool = Field(True, description="write BOS before a text")
    suffix: Literal[""] = Field("", description="not supported, because no model here fills in the middle")

    @model_validator(mode="after")
    def _is_possible_completion(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; allowed: 1 or more, or 0 with echo")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError("best_of is less than n")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError("best_of and stream exclude each other")
        if self.baton.output_token_ids and (self.echo or len(self.prompts) > 1):
            raise ValueError("baton.output_token_ids exclude echo and several prompts")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ValueError("echo and truncate_prompt_tokens exclude each other")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TokenizeBody(Model):
    """POST /tokenize, for a text or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool = Field(True, description="of prompt; a template writes them itself")
    return_token_strs: bool = False
    tools: Items[ChatTool] = Field([])
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt and messages exclude each other, and one is needed")
        return self


class DetokenizeBody(Model):
    """POST /detokenize"""

    model: str = ""
    tokens: Items[Uint32]
    skip_special_tokens: bool = False
