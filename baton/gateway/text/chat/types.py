"""Plain values that the APIs and `baton.gateway.text.chat` exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from baton.core.types import Grammar

Json = Mapping[str, Any]


@dataclass(frozen=True)
class NamedTool:
    """A `tool_choice` that names one function."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class ChatRequest:
    """A conversation from a client. Messages and tools have the shapes of OpenAI's chat completions.

    Attributes:
        messages: messages with `role` and `content` (a string or parts of type text), and optionally `tool_calls`,
            `tool_call_id`, `name` and `reasoning_content`.
        tools: tools as `{"type": "function", "function": {"name", "description", "parameters"}}`.
        grammar: constraint on the answer after the reasoning. Tool calls with markers remain possible.
        template_kwargs: more variables of the template, such as `enable_thinking` or `documents`.
        template: name of one of the checkpoint's templates; None: `tool_use` or the default.
        add_generation_prompt: whether the prompt ends with the beginning of an answer; None: yes, unless
            `continue_final_message` is set.
        raw_tool: the tool whose call the output is: its input without any markup, which matches `grammar`; empty: none.
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
    raw_tool: str = ""

    @property
    def one_call(self) -> bool:
        """Whether at most one tool call is allowed. Clients that name a function expect one call of it."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool)


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call. Only the first piece has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True)
class ParsedDelta:
    """New answer text, reasoning and tool calls, parsed from the model's text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser(Protocol):
    """Splits one output into reasoning, answer and tool calls while it arrives. Text that may begin a marker is held
    back. The result does not depend on how the text was cut into pieces."""

    def push(self, text: str) -> list[ParsedDelta]:
        """Takes the next piece of text, and returns what it adds."""
        ...

    def finish(self, *, cut: bool, stopped: bool = False) -> list[ParsedDelta]:
        """Ends the text, and returns what was held back.

        Args:
            cut: whether the output reached its limit. If so, an open call stays open; else it is closed as valid JSON.
            stopped: whether a stop string ended the output, which may have come before anything of a call.
        """
        ...


@dataclass(frozen=True)
class PreparedChat:
    """A conversation that is ready for generation.

    Attributes:
        prompt: the rendered template. Tokenize it with `add_special_tokens=False`, because the template writes BOS.
        grammar: constraint on the output, or None.
        skip_special_tokens: False if the parser needs markers that are special tokens.
        stop_token_ids: additional tokens that end the answer, such as <|eom_id|>.
        named: the prompt with secret names in place of the template's special tokens; None if secret names are off.
    """

    prompt: str
    grammar: Grammar | None
    skip_special_tokens: bool
    stop_token_ids: tuple[int, ...] = ()
    named: str | None = None

    @property
    def to_encode(self) -> str:
        """The text to pass to the gateway's tokenizer."""
        return self.prompt if self.named is None else self.named
