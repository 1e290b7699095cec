"""One chat template, and the format in which the model answers to it: prompts, grammars and readers."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from types import MappingProxyType

from jinja2 import nodes

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat import constraints
from baton.gateway.text.chat.checkpoint import Checkpoint
from baton.gateway.text.chat.constraints import Forced, Lark, name_of
from baton.gateway.text.chat.families import HARMONY, UNKNOWN, ChatFamily, family_of, reasoning_of
from baton.gateway.text.chat.messages import (
    MessageForm,
    add_tools,
    content_format,
    cut_at_mark,
    for_template,
    mark_final,
    shows_results,
    takes_argument_objects,
    takes_system_anywhere,
)
from baton.gateway.text.chat.parsing.call_list import content_only
from baton.gateway.text.chat.parsing.harmony import harmony, opened_header
from baton.gateway.text.chat.parsing.llama import llama
from baton.gateway.text.chat.parsing.parser import Read, ReasoningMarkers, with_reasoning, without_marker
from baton.gateway.text.chat.templates import ChatTemplate, Misfit, refused
from baton.gateway.text.chat.types import ChatRequest, Json, NamedTool

TYPE_TEST = re.compile(r"\bis\s+(not\s+)?(string|iterable|sequence|mapping)\b")
TAG = re.compile(r"\{[%{]([^{}]*)[%}]\}")
WORD = re.compile(r"\w+", re.ASCII)
SWITCHES = frozenset({"enable_thinking", "thinking"})  # variables of hybrid templates that turn reasoning on and off
# In place of a content that a message does not have.
_ABSENT: Mapping[str, str | None] = MappingProxyType({})
_NULL: Mapping[str, str | None] = MappingProxyType({"content": None})
_EMPTY: Mapping[str, str | None] = MappingProxyType({"content": ""})
HARMONY_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class Dialect:
    """One template, and the format in which the model answers to it."""

    template: ChatTemplate
    checkpoint: Checkpoint

    @cached_property
    def family(self) -> ChatFamily:
        return family_of(self.template.text, self.checkpoint.model_type)

    @cached_property
    def _reasoning(self) -> ReasoningMarkers | None:
        return reasoning_of(self.template.text)

    @cached_property
    def _takes_tools(self) -> bool:
        return self._has_tools_variable or self._reads_tools_of_messages

    @cached_property
    def _has_tools_variable(self) -> bool:
        return any(name.name == "tools" for name in self.template.tree.find_all(nodes.Name))

    @cached_property
    def _reads_tools_of_messages(self) -> bool:
        """Whether the template takes tools from the system message only, as Phi-4 mini's does."""
        items = self.template.tree.find_all(nodes.Getitem)
        keys = (item.arg.value for item in items if isinstance(item.arg, nodes.Const))
        names = (item.attr for item in self.template.tree.find_all(nodes.Getattr))
        return not self._has_tools_variable and "tools" in (*keys, *names)

    def unread_tools(self, request: ChatRequest) -> bool:
        """Whether the template shows the request's tools to the model, but nothing reads the model's calls."""
        is_read = bool(request.raw_tool) or is_forced(request)
        return bool(visible_tools(request)) and not is_read and self.hides_calls

    @cached_property
    def hides_calls(self) -> bool:
        """Whether calls that the model writes with this template would be text, because their format is unknown."""
        return self.family is UNKNOWN and "tools" in self._names

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
                "the model's chat template does not support tools",
                field="tools",
                cure="set tool_choice to required or to a function, which forces a call, or to none; agents need a "
                "model whose template supports them, or such a template with --chat-template",
            )

    def render(self, request: ChatRequest) -> str:
        form = self._form
        try:
            return self._render(request, form)
        except Misfit as error:
            # Some templates concatenate arguments as strings, test whether the content is None, or concatenate it.
            # One that knows no calls concatenates too, but would lose the results: such a conversation is refused.
            strings = replace(form, argument_objects=not form.argument_objects)
            empty = (_EMPTY,) if shows_results(self.template, self.checkpoint.variables) else ()
            for other, missing in product((form, strings), (_ABSENT, _NULL, *empty)):
                with suppress(Misfit, InvalidRequest):
                    return self._render(request, other, missing)
            raise refused(error) from error

    def _render(self, request: ChatRequest, form: MessageForm, missing: Mapping[str, str | None] = _ABSENT) -> str:
        """Writes the prompt.

        Args:
            missing: what a message has in place of a content that is not there, such as that of a call.
        """
        messages = [{**missing, **message} for message in for_template(request.messages, form)]
        if self._reads_tools_of_messages:
            add_tools(messages, visible_tools(request))
        text = mark_final(messages) if request.continue_final_message else ""
        generates = request.add_generation_prompt
        prompt = self.template.render(
            messages,
            visible_tools(request) or None,
            add_generation_prompt=not request.continue_final_message if generates is None else generates,
            variables={**self.checkpoint.variables, **request.template_kwargs},
        )
        return cut_at_mark(prompt, text) if request.continue_final_message else prompt

    def marks(self, request: ChatRequest) -> tuple[str, ...]:
        """Returns the texts that this request's parser looks for."""
        markers = self._reasoning
        marks = (markers.open, markers.close, *(markers.answer or ())) if markers else ()
        return (*marks, *self.family.marks) if visible_tools(request) or self.family is HARMONY else marks

    def _reasoning_opened(self, request: ChatRequest, prompt: str) -> bool:
        """Whether the output begins inside reasoning, because the prompt ends with its opening marker."""
        markers = self._reasoning
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
        tools = [] if request.raw_tool else visible_tools(request)
        if self.family is HARMONY:
            return harmony(opened_header(prompt), tools=bool(tools))
        schemas = {name_of(tool): tool["function"].get("parameters") or {} for tool in tools}
        if self.family is UNKNOWN and is_forced(request):
            read = llama(schemas)  # the format that the grammar forces
        else:
            read = self.family.read(schemas) if tools else content_only
        markers = self._reasoning
        if markers is None:
            return read
        if prompt.rstrip().endswith(markers.close):
            return without_marker(markers.close, read)
        return with_reasoning(
            markers,
            read,
            opened=self._reasoning_opened(request, prompt),
            implied=self._asks_for_reasoning(request),
            marks=self.family.marks if tools else (),
        )

    def _asks_for_reasoning(self, request: ChatRequest) -> bool:
        """Whether the client turned the reasoning of a hybrid template on, and no grammar rules what comes first."""
        if request.grammar is not None or is_forced(request) or request.continue_final_message:
            return False
        return any(request.template_kwargs.get(name) is True for name in SWITCHES & self._names)

    @cached_property
    def _names(self) -> frozenset[str]:
        """Words in the template's statements. Unlike `template.tree`, they cost nothing that must be bounded."""
        return frozenset(word for tag in TAG.findall(self.template.text) for word in WORD.findall(tag))

    def grammar(self, request: ChatRequest, prompt: str) -> Grammar | None:
        """Returns the output's grammar: reasoning, then forced calls or the request's grammar. None: no constraint."""
        forced = is_forced(request)
        if request.grammar is None and not forced:
            return None
        if request.grammar is not None and not forced and request.grammar.kind is GrammarKind.STRUCTURAL_TAG:
            return request.grammar  # its tags occur in free text, and reasoning is free text too
        lark = Lark({text: token for text, token in self.checkpoint.tokens.items() if self._is_no_text(text)})
        tools = Forced([] if request.raw_tool else callable_tools(request), parallel=not request.one_call)
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
        markers = self._reasoning
        if markers is None or prompt.rstrip().endswith(markers.close):
            return ""
        return constraints.reasoning(lark, markers, opened=self._reasoning_opened(request, prompt))


def is_forced(request: ChatRequest) -> bool:
    """Whether a request forces a call that a reader must find in the output."""
    if request.raw_tool:
        return False
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def visible_tools(request: ChatRequest) -> list[Json]:
    """Returns the tools that the model sees."""
    return [] if request.tool_choice == "none" else list(request.tools)


def callable_tools(request: ChatRequest) -> list[Json]:
    """Returns the tools that the model may call."""
    if isinstance(request.tool_choice, NamedTool):
        return [tool for tool in request.tools if name_of(tool) == request.tool_choice.name]
    return visible_tools(request)
