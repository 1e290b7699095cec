"""Converts a chat request to a prompt and a grammar, and returns the parser of each output."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jinja2 import nodes

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat import constraints
from baton.gateway.text.chat.checkpoint import DEFAULT, TOOL_USE, Checkpoint
from baton.gateway.text.chat.constraints import Forced, Lark, name_of
from baton.gateway.text.chat.families import HARMONY, UNKNOWN, ChatFamily, family_of, reasoning_of
from baton.gateway.text.chat.messages import (
    MessageForm,
    content_format,
    cut_at_mark,
    for_template,
    mark_final,
    takes_argument_objects,
    takes_system_anywhere,
)
from baton.gateway.text.chat.parsing.calls import content_only, llama
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.harmony import harmony, opened_header
from baton.gateway.text.chat.parsing.parser import FormatParser, Read, with_reasoning
from baton.gateway.text.chat.templates import ChatTemplate, Misfit, refused
from baton.gateway.text.chat.types import ChatRequest, Json, NamedTool, OutputParser, PreparedChat
from baton.gateway.text.chat.user_text import UserText

# Variables of templates that a request sets by its own fields.
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
TYPE_TEST = re.compile(r"\bis\s+(not\s+)?(string|iterable|sequence|mapping)\b")
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHORT_ID_CHARS = 9
HARMONY_FINAL = "<|channel|>final<|message|>"


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
        self._dialects = {name: _Dialect(ChatTemplate(text), checkpoint) for name, text in checkpoint.templates.items()}

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

        def call_id(index: int) -> str:
            digest = hashlib.sha256(f"{seed}/{index}/{prepared.prompt}".encode()).digest()
            if dialect.family.short_ids:
                return "".join(LETTERS[byte % len(LETTERS)] for byte in digest[:SHORT_ID_CHARS])
            return "call_" + digest[:12].hex()

        out = Collector(call_id, one_call=request.one_call)
        return FormatParser(dialect.reader(request, prepared.prompt), out)

    def _dialect(self, request: ChatRequest) -> "_Dialect":
        if not self._dialects:
            cure = "start the gateway with --chat-template FILE, or send a prompt to completions"
            raise InvalidRequest("the model has no chat template", field="messages", cure=cure)
        names = tuple(sorted(self._dialects))
        name = request.template
        if name is None:
            name = TOOL_USE if _visible_tools(request) and TOOL_USE in self._dialects else DEFAULT
        dialect = self._dialects.get(name)
        if dialect is not None:
            return dialect
        # A template is a program, so a request may choose one of the checkpoint's but not bring its own.
        shown = name if len(name) <= 40 and name.isprintable() else "a template of the request"
        raise InvalidRequest(
            f"chat_template is {shown!r}", field="chat_template", value=shown, allowed=names,
            cure="give a name, or start the gateway with --chat-template FILE",
        )  # fmt: skip


@dataclass(frozen=True)
class _Dialect:
    """One template, and the format in which the model answers to it."""

    template: ChatTemplate
    checkpoint: Checkpoint

    @cached_property
    def family(self) -> ChatFamily:
        return family_of(self.template.text, self.checkpoint.model_type)

    @cached_property
    def _takes_tools(self) -> bool:
        return any(name.name == "tools" for name in self.template.tree.find_all(nodes.Name))

    @cached_property
    def _form(self) -> MessageForm:
        content = content_format(self.template)
        text = self.template.text
        variables = self.checkpoint.variables
        form = MessageForm(
            content=content,
            wrap_strings=content == "parts" and not TYPE_TEST.search(text),
            argument_objects=takes_argument_objects(self.template, variables),
            developer="developer" in text,
            system_anywhere=True,
        )
        return replace(form, system_anywhere=takes_system_anywhere(self.template, variables, form))

    def check(self) -> None:
        """Checks that the text is a template.

        Raises:
            ConfigError: the text is not a jinja template.
        """
        _ = self.template.compiled, self._form

    def check_tools(self, request: ChatRequest) -> None:
        """Checks that the template shows tools to the model.

        Raises:
            InvalidRequest: the model would never see the tools.
        """
        if request.tools and request.tool_choice == "auto" and not self._takes_tools:
            raise InvalidRequest(
                "the model's chat template takes no tools",
                field="tools",
                cure="set tool_choice to required or to a function, which forces a call, or to none",
            )

    def render(self, request: ChatRequest) -> str:
        form = self._form
        try:
            return self._render(request, form, keep_none=False)
        except Misfit as error:
            # Some templates concatenate arguments as strings, or test whether the content is None.
            strings = replace(form, argument_objects=not form.argument_objects)
            for other, keep_none in ((form, True), (strings, False), (strings, True)):
                with suppress(Misfit, InvalidRequest):
                    return self._render(request, other, keep_none=keep_none)
            raise refused(error) from error

    def _render(self, request: ChatRequest, form: MessageForm, *, keep_none: bool) -> str:
        messages = for_template(request.messages, form)
        if keep_none:
            for message in messages:
                message.setdefault("content", None)
        text = mark_final(messages) if request.continue_final_message else ""
        generates = request.add_generation_prompt
        prompt = self.template.render(
            messages,
            _visible_tools(request) or None,
            add_generation_prompt=not request.continue_final_message if generates is None else generates,
            variables={**self.checkpoint.variables, **request.template_kwargs},
        )
        return cut_at_mark(prompt, text) if request.continue_final_message else prompt

    def marks(self, request: ChatRequest) -> tuple[str, ...]:
        """Returns the texts that this request's parser looks for."""
        markers = reasoning_of(self.template.text)
        marks = (markers.open, markers.close) if markers else ()
        return (*marks, *self.family.marks) if _visible_tools(request) or self.family is HARMONY else marks

    def _reasoning_opened(self, request: ChatRequest, prompt: str) -> bool:
        """Whether the output begins inside reasoning, because the prompt ends with its opening marker."""
        markers = reasoning_of(self.template.text)
        if markers is None:
            return False
        if request.continue_final_message:
            tail = prompt[prompt.rfind(markers.open) :]
            written = str(request.messages[-1].get("content"))
            return prompt.rstrip().endswith(markers.open) or (
                markers.open in tail and markers.open in written and markers.close not in tail
            )
        return prompt.rstrip().endswith(markers.open)

    def reader(self, request: ChatRequest, prompt: str) -> Read:
        tools = [] if request.is_raw_input else _visible_tools(request)
        if self.family is HARMONY:
            return harmony(opened_header(prompt), tools=bool(tools))
        schemas = {name_of(tool): tool["function"].get("parameters") or {} for tool in tools}
        if self.family is UNKNOWN and _is_forced(request):
            read = llama(schemas)  # the format that the grammar forces
        else:
            read = self.family.read(schemas) if tools else content_only
        markers = reasoning_of(self.template.text)
        if markers is None or prompt.rstrip().endswith(markers.close):
            return read
        return with_reasoning(markers, read, opened=self._reasoning_opened(request, prompt))

    def grammar(self, request: ChatRequest, prompt: str) -> Grammar | None:
        """Returns the output's grammar: reasoning, then forced calls or the request's grammar. None: no constraint."""
        forced = _is_forced(request)
        if request.grammar is None and not forced:
            return None
        if request.grammar is not None and not forced and request.grammar.kind is GrammarKind.STRUCTURAL_TAG:
            return request.grammar  # its tags occur in free text, and reasoning is free text too
        lark = Lark({text: token for text, token in self.checkpoint.tokens.items() if self._is_no_text(text)})
        tools = Forced([] if request.is_raw_input else _callable_tools(request), parallel=not request.one_call)
        before = self._before_answer(lark, request, prompt)
        if forced or request.grammar is None:
            return lark.finish(f"{before} {self.family.force(lark, tools)}")
        final = lark.literal(HARMONY_FINAL) if self.family is HARMONY and opened_header(prompt) is None else ""
        if tools.tools and not self.family.bare:
            answer = lark.rule(f"{final} {constraints.answer(request.grammar)}")
            calls = lark.rule(self.family.force(lark, tools))
            return lark.finish(f"{before} ({answer} | {calls})")
        if not before and not final:
            return request.grammar
        return lark.finish(f"{before} {final} {constraints.answer(request.grammar)}")

    def _is_no_text(self, token: str) -> bool:
        """Whether a grammar must name the token by its id. llguidance treats added tokens like <this> as special."""
        return token in self.checkpoint.special or (token.startswith("<") and token.endswith(">"))

    def _before_answer(self, lark: Lark, request: ChatRequest, prompt: str) -> str:
        """Returns an expression for the reasoning before the answer; empty if there is none."""
        if self.family is HARMONY:
            return constraints.harmony_analysis(lark) if opened_header(prompt) is None else ""
        markers = reasoning_of(self.template.text)
        if markers is None or prompt.rstrip().endswith(markers.close):
            return ""
        return constraints.reasoning(lark, markers, opened=self._reasoning_opened(request, prompt))


def _is_forced(request: ChatRequest) -> bool:
    if request.is_raw_input:
        return False
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def _visible_tools(request: ChatRequest) -> list[Json]:
    """Returns the tools that the model sees."""
    return [] if request.tool_choice == "none" else list(request.tools)


def _callable_tools(request: ChatRequest) -> list[Json]:
    if isinstance(request.tool_choice, NamedTool):
        return [tool for tool in request.tools if name_of(tool) == request.tool_choice.name]
    return _visible_tools(request)


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
    if request.continue_final_message and _is_forced(request):
        raise InvalidRequest(
            "continue_final_message excludes a forced tool call",
            field="continue_final_message",
            value=True,
            cure="set tool_choice to auto or none",
        )
    if request.tool_choice == "required" and not request.tools:
        raise InvalidRequest("tool_choice is required, but there are no tools", field="tool_choice", cure="give tools")
    if isinstance(request.tool_choice, NamedTool) and not _callable_tools(request):
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
