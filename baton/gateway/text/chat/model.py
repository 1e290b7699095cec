"""Converts a chat request to a prompt and a grammar, and returns the parser of each output."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from baton.core.errors import InvalidRequest
from baton.gateway.text.chat.checkpoint import DEFAULT, TOOL_USE, Checkpoint
from baton.gateway.text.chat.constraints import name_of
from baton.gateway.text.chat.dialect import Dialect, callable_tools, is_forced, visible_tools
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.parser import FormatParser
from baton.gateway.text.chat.templates import ChatTemplate
from baton.gateway.text.chat.types import ChatRequest, NamedTool, OutputParser, PreparedChat
from baton.gateway.text.chat.user_text import UserText

# Variables of templates that a request sets by its own fields.
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHORT_ID_CHARS = 9


def read_chat_model(directory: Path, template_file: Path | None) -> "ChatModel":
    """Reads a checkpoint's chat templates and compiles them. `template_file`, if given, replaces all of them.

    Raises:
        ConfigError: a file cannot be read, or is not a template.
    """
    # The rendering process does not need this import.
    from baton.gateway.text.chat.checkpoint_files import read_checkpoint

    model = ChatModel(read_checkpoint(directory, template_file))
    model.check()
    return model


class ChatModel:
    """Prepares conversations for one checkpoint, and parses its outputs. Threads may share it.

    A gateway prepares requests through `baton.gateway.text.chat.renderer`, because a template may run forever.

    Args:
        aliases: secret names of the special tokens by their own names (`TextTokenizer.aliases`), if clients' special
            tokens must stay text; empty: they need not.
    """

    def __init__(self, checkpoint: Checkpoint, aliases: Mapping[str, str] | None = None) -> None:
        self._checkpoint = checkpoint
        self._user_text = UserText(aliases) if aliases else None
        self._dialects = {name: Dialect(ChatTemplate(text), checkpoint) for name, text in checkpoint.templates.items()}

    @property
    def has_template(self) -> bool:
        return bool(self._dialects)

    def check(self) -> None:
        """Compiles each template and renders a short conversation.

        Raises:
            ConfigError: a text is not a jinja template.
        """
        for dialect in self._dialects.values():
            dialect.check()

    @property
    def unread_templates(self) -> tuple[str, ...]:
        """Names of the templates that show tools to the model in a format which nothing here reads."""
        return tuple(name for name, dialect in self._dialects.items() if dialect.hides_calls)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What operators should know about the templates."""
        return tuple(
            f"the chat template {name!r} shows tools in an unknown format: calls come out as text"
            for name in self.unread_templates
        )

    def leaves_calls_unread(self, request: ChatRequest) -> bool:
        """Whether calls that the model chooses to make would come out as text, because their format is unknown."""
        return bool(self._dialects) and self._dialect(request).unread_tools(request)

    def prepare(self, request: ChatRequest) -> PreparedChat:
        """Renders the conversation, and builds its grammar.

        Raises:
            InvalidRequest: the template refuses the conversation, or fields contradict each other; the error names one.
        """
        _check(request)
        dialect = self._dialect(request)
        dialect.check_tools(request)
        named = None
        if self._user_text is None:
            prompt = dialect.render(request)
        else:
            prompt, named = self._user_text.separate(dialect.render(self._user_text.mark(request)))
        try:
            grammar = dialect.grammar(request, prompt)
        except RecursionError as error:
            raise InvalidRequest("a schema is nested too deeply", field="tools") from error
        _check_text(prompt, "messages")
        _check_text("" if grammar is None else grammar.text, "tools" if request.tools else "grammar")
        family = dialect.family
        tokens = self._checkpoint.tokens
        return PreparedChat(
            prompt=prompt,
            grammar=grammar,
            skip_special_tokens=not any(mark in self._checkpoint.special for mark in dialect.marks(request)),
            stop_token_ids=tuple(tokens[text] for text in family.end_tokens if text in tokens),
            named=named,
        )

    def parser(self, request: ChatRequest, prepared: PreparedChat, seed: str) -> OutputParser:
        """Returns the parser of one output.

        Args:
            seed: makes the ids of tool calls, together with the prompt. Pass a different seed for each output of a
                request; the prompt distinguishes turns with the same request id.
        """
        dialect = self._dialect(request)

        ids = dialect.family.ids
        before = sum(len(message.get("tool_calls") or ()) for message in request.messages) if ids == "named" else 0

        def call_id(index: int) -> str:
            if ids == "named":
                return str(before + index)  # Kimi counts the calls of the whole conversation
            digest = hashlib.sha256(f"{seed}/{index}/{prepared.prompt}".encode()).digest()
            if ids == "short":
                return "".join(LETTERS[byte % len(LETTERS)] for byte in digest[:SHORT_ID_CHARS])
            return "call_" + digest[:12].hex()

        named = ids == "named"
        out = Collector(call_id, one_call=request.one_call, named_ids=named, input_of=request.raw_tool)
        return FormatParser(dialect.reader(request, prepared.prompt), out)

    def _dialect(self, request: ChatRequest) -> "Dialect":
        if not self._dialects:
            cure = "start the gateway with --chat-template FILE, or send a prompt to completions"
            raise InvalidRequest("the model has no chat template", field="messages", cure=cure)
        names = tuple(sorted(self._dialects))
        name = request.template
        if name is None:
            name = TOOL_USE if visible_tools(request) and TOOL_USE in self._dialects else DEFAULT
        dialect = self._dialects.get(name)
        if dialect is not None:
            return dialect
        # A template is a program, so a request may choose one of the checkpoint's but not bring its own.
        shown = name if len(name) <= 40 and name.isprintable() else "a template of the request"
        raise InvalidRequest(
            f"chat_template is {shown!r}", field="chat_template", value=shown, allowed=names,
            cure="give a name, or start the gateway with --chat-template FILE",
        )  # fmt: skip


def _check(request: ChatRequest) -> None:
    if not request.messages:
        raise InvalidRequest("messages is empty", field="messages", cure="give at least one message")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message are both set",
            field="continue_final_message",
            value=True,
            cure="set one of them",
        )
    for name in RESERVED:
        if name in request.template_kwargs:
            field = f"chat_template_kwargs.{name}"
            cure = "use the request's own field"
            raise InvalidRequest(f"{field} is not a variable of templates", field=field, cure=cure)
    if request.continue_final_message and is_forced(request):
        raise InvalidRequest(
            "continue_final_message excludes a forced tool call",
            field="continue_final_message",
            value=True,
            cure="set tool_choice to auto or none",
        )
    if request.tool_choice == "required" and not request.tools:
        raise InvalidRequest("tool_choice is required, but there are no tools", field="tool_choice", cure="add tools")
    if isinstance(request.tool_choice, NamedTool) and not callable_tools(request):
        raise InvalidRequest(
            f"tool_choice names {request.tool_choice.name!r}",
            field="tool_choice",
            value=request.tool_choice.name,
            allowed=tuple(map(name_of, request.tools)),
        )


def _check_text(text: str, field: str) -> None:
    """Refuses half of a surrogate pair, which JSON can express but tokenizers cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise InvalidRequest(
            f"{field} has {half}, which is not a character", field=field, value=half, cure="send valid Unicode"
        ) from error
