"""What doors and `baton.gateway.text.chat` exchange. Plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from baton.core.types import Grammar

Json = Mapping[str, Any]


@dataclass(frozen=True)
class NamedTool:
    """`tool_choice` of one function."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class ChatRequest:
    """A conversation as a client gives it. Messages and tools have the shapes of OpenAI's chat completions.

    Attributes:
        messages: each with `role` and `content` (a string or parts of type text), `tool_calls`, `tool_call_id`, `name`,
            `reasoning_content`.
        tools: `{"type": "function", "function": {"name", "description", "parameters"}}` each.
        grammar: what the answer must be; applies after the reasoning. Calls stay free where they have markers.
        template_kwargs: further variables of the template, such as `enable_thinking` or `documents`.
        template: the name of one of the checkpoint's templates; None: `tool_use` or the default.
        add_generation_prompt: None: unless `continue_final_message`.
    """

    messages: Sequence[Json]
    tools: Sequence[Json] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    template_kwargs: Json = field(default_factory=dict)
    template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def one_call(self) -> bool:
        """Whether there is at most one tool call: clients that name a function expect one call of it."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool)


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of one tool call. The first piece of a call has its `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class ParsedDelta:
    """What some more text of the model means."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser(Protocol):
    """Splits one output, as it comes, into reasoning, answer and tool calls. Text that may begin a marker is held back.
    The result does not depend on how the text was cut into pieces."""

    def push(self, text: str) -> list[ParsedDelta]:
        """Takes the text of some more tokens."""
        ...

    def finish(self, *, cut: bool) -> list[ParsedDelta]:
        """Returns what was held back: no more text comes.

        Args:
            cut: the output reached its limit. Then an open call stays open; otherwise its arguments become valid JSON.
        """
        ...


@dataclass(frozen=True)
class PreparedChat:
    """A conversation ready to be generated.

    Attributes:
        prompt: the rendered template. Tokenize it with `add_special_tokens=False`: the template writes BOS itself.
        grammar: what the output must be, or None.
        skip_special_tokens: False where markers that the parser needs are special tokens.
        stop_token_ids: further ids that end the answer, such as <|eom_id|>.
        named: the prompt as the tokenizer takes it, where only secret names are special tokens; None: as it is.
    """

    prompt: str
    grammar: Grammar | None
    skip_special_tokens: bool
    stop_token_ids: tuple[int, ...] = ()
    named: str | None = None

    @property
    def to_encode(self) -> str:
        """What the gateway's tokenizer takes."""
        return self.prompt if self.named is None else self.named
