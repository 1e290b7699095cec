"""Models of the input items in a body of `POST /v1/responses`: all kinds that Codex and OpenAI's libraries send."""

import base64
import binascii
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.gateway.http.checking import TEXT_OR_LIST, Items, JsonObject, Model, by_type, tag, unsupported
from baton.gateway.http.responses.tools import Ignored, Tool, by_type_alike

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# Kinds that only OpenAI can produce or read. The model does not see them.
UNREAD = frozenset(
    {
        "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
        "computer_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
        "program", "program_output", "compaction", "compaction_summary", "context_compaction", "configuration_update",
        "ghost_snapshot",
    }
)  # fmt: skip
_NO_TEXT = frozenset({"input_image", "input_file", "input_audio", "encrypted_content"})

_REFUSED = "|"  # a tag that no error lists as allowed

_READABLE = "baton-reasoning:"  # beginning of an `encrypted_content` that any gateway of ours can read


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


class NoText(BaseModel):
    """An image or file in a tool's output."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    type: str

    @property
    def text(self) -> str:
        """The model's hint that something is missing: an agent that fails here could never go on."""
        return f"[{self.type.removeprefix('input_')} left out: the model reads text only]"


class RefusedPart(BaseModel):
    """An image, a file or a sound in a message. It is refused."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    type: Annotated[None, unsupported("the model reads text only: send the content as text, or leave it out")]
    text: str = ""


def _part_shape(kind: str) -> str:
    return _REFUSED if kind in _NO_TEXT else kind


Part = Annotated[
    Annotated[InputText, tag("input_text")]
    | Annotated[OutputText, tag("output_text")]
    | Annotated[RefusalPart, tag("refusal")]
    | Annotated[RefusedPart, tag(_REFUSED)],
    by_type(family=_part_shape),
]
TextOrParts = Annotated[Annotated[str, tag("text")] | Annotated[Items[Part], tag("list")], TEXT_OR_LIST]


OutputPart = Annotated[
    Annotated[InputText, tag("input_text")]
    | Annotated[OutputText, tag("output_text")]
    | Annotated[RefusalPart, tag("refusal")]
    | Annotated[NoText, tag("input_image")],
    by_type_alike(dict.fromkeys(_NO_TEXT, "input_image")),
]
ToolOutput = Annotated[Annotated[str, tag("text")] | Annotated[Items[OutputPart], tag("list")], TEXT_OR_LIST]


class ItemModel(Model):
    """The fields that all items may have."""

    id: str | None = None
    status: ItemStatus | None = None
    caller: Ignored = None
    internal_chat_message_metadata_passthrough: Ignored = None  # Codex's own


class Message(ItemModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    phase: Literal["commentary", "final_answer"] | None = None
    end_turn: Ignored = None


class AgentMessage(ItemModel):
    """What one agent of Codex sends to another."""

    type: Literal["agent_message"]
    author: str = ""
    recipient: str = ""
    content: ToolOutput


class FunctionCall(ItemModel):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    arguments: str
    encrypted_function_args: Ignored = None
    async_: Annotated[None, unsupported("leave it out", False)] = Field(default=None, alias="async")


class CustomToolCall(ItemModel):
    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    input: str
    async_: Annotated[None, unsupported("leave it out", False)] = Field(default=None, alias="async")


class CallOutput(ItemModel):
    """The output of a function or of a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: ToolOutput
    name: Ignored = None
    namespace: Ignored = None


class LocalShellCall(ItemModel):
    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: JsonObject


class ShellCall(ItemModel):
    type: Literal["shell_call"]
    call_id: Annotated[str, Field(min_length=1)]
    action: JsonObject
    environment: Ignored = None
    created_by: Ignored = None


class ApplyPatchCall(ItemModel):
    type: Literal["apply_patch_call"]
    call_id: Annotated[str, Field(min_length=1)]
    operation: JsonObject
    created_by: Ignored = None


class ToolSearchCall(ItemModel):
    type: Literal["tool_search_call"]
    call_id: str | None = None
    arguments: Ignored
    execution: Literal["server", "client"] | None = None
    created_by: Ignored = None


class LocalShellOutput(ItemModel):
    type: Literal["local_shell_call_output"]
    call_id: str | None = None  # OpenAI's library has the call's id in `id`
    output: str


class ShellOutput(ItemModel):
    type: Literal["shell_call_output"]
    call_id: str
    output: Annotated[Annotated[str, tag("text")] | Annotated[Items[JsonObject], tag("list")], TEXT_OR_LIST]
    max_output_length: Ignored = None
    created_by: Ignored = None


class ApplyPatchOutput(Model):
    type: Literal["apply_patch_call_output"]
    id: str | None = None
    call_id: str
    status: Literal["completed", "failed"]
    output: str | None = None
    caller: Ignored = None
    created_by: Ignored = None


class ToolSearchOutput(ItemModel):
    """The tools that a search found. The model sees them from then on."""

    type: Literal["tool_search_output"]
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    tools: Items[Tool]
    created_by: Ignored = None


class AdditionalTools(ItemModel):
    """Tools that are not in the body's own list."""

    type: Literal["additional_tools"]
    role: Literal["developer"] | None = None
    tools: Items[Tool]


class SummaryText(Model):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Model):
    type: Literal["reasoning_text", "text"]
    text: str


class Reasoning(ItemModel):
    """Reasoning of an earlier turn. Baton reads `encrypted_content` that it wrote, and leaves out anybody else's."""

    type: Literal["reasoning"]
    summary: Items[SummaryText] = Field(default_factory=list)
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        if self.content:
            return "\n".join(part.text for part in self.content)
        return unsealed(self.encrypted_content or "") or "\n".join(part.text for part in self.summary)


class ItemReference(Model):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1)]


class UnreadItem(BaseModel):
    """An item that only OpenAI can read."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    type: str


Item = Annotated[
    Annotated[Message, tag("message")]
    | Annotated[FunctionCall, tag("function_call")]
    | Annotated[CallOutput, tag("function_call_output")]
    | Annotated[Reasoning, tag("reasoning")]
    | Annotated[CustomToolCall, tag("custom_tool_call")]
    | Annotated[LocalShellCall, tag("local_shell_call")]
    | Annotated[LocalShellOutput, tag("local_shell_call_output")]
    | Annotated[ShellCall, tag("shell_call")]
    | Annotated[ShellOutput, tag("shell_call_output")]
    | Annotated[ApplyPatchCall, tag("apply_patch_call")]
    | Annotated[ApplyPatchOutput, tag("apply_patch_call_output")]
    | Annotated[ToolSearchCall, tag("tool_search_call")]
    | Annotated[ToolSearchOutput, tag("tool_search_output")]
    | Annotated[AdditionalTools, tag("additional_tools")]
    | Annotated[AgentMessage, tag("agent_message")]
    | Annotated[ItemReference, tag("item_reference")]
    | Annotated[UnreadItem, tag("web_search_call")],
    by_type_alike(
        dict.fromkeys(UNREAD, "web_search_call") | {"custom_tool_call_output": "function_call_output"}, "message"
    ),
]


def sealed(reasoning: str) -> str:
    """Returns reasoning as an `encrypted_content`, for clients that send nothing else of it again.

    It is encoded, not encrypted, because the item's `content` has the same text in the clear.
    """
    return _READABLE + base64.b64encode(reasoning.encode()).decode()


def unsealed(content: str) -> str:
    """Returns the reasoning in an `encrypted_content`; empty if it is not ours."""
    if not content.startswith(_READABLE):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_READABLE), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
