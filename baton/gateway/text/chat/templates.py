"""Compiles a chat template in a sandbox, and renders it with the variables that transformers provides.

A template is a program from the checkpoint. It can reach only its variables, and its output is limited. Its time is
not limited here, so a gateway compiles and renders in a bounded process (`baton.gateway.text.chat.renderer`). It can
ask for the date, as templates of Llama 3.1 do.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.core.errors import ConfigError, InvalidRequest

PROMPT_CHARS_MAX = 64 << 20
RANGE_ITEMS_MAX = 20_000  # in all ranges of one rendering together, because nested loops could take forever
# Marks the end of the text to continue: two characters that no template writes, and a space that templates may trim.
CONTINUE_MARK = "\U000f0baf\U000f0baf "

# Errors for a conversation that the template's author did not expect. The sandbox's refusals are TemplateErrors.
RENDER_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip

# Jinja compiles to Python, which Python may refuse: `{% break %}` outside a loop is a SyntaxError.
COMPILE_ERRORS = (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)


class Misfit(Exception):
    """The template failed on the types of the conversation's values. It did not refuse the conversation itself."""


class ChatTemplate:
    """A chat template, compiled at its first use.

    Args:
        name: field or file of the template, for errors.
        now: the clock that `strftime_now` reads.
    """

    def __init__(self, text: str, name: str = "chat_template", now: Callable[[], datetime] = datetime.now) -> None:
        self.text = text
        self._name = name
        self._environment = _environment(now)

    @cached_property
    def tree(self) -> nodes.Template:
        """The template's syntax tree.

        Raises:
            ConfigError: the text is not a jinja template.
        """
        with self._compiling():
            return self._environment.parse(self.text)

    @cached_property
    def compiled(self) -> jinja2.Template:
        """The template, ready to render.

        Raises:
            ConfigError: the text is not a jinja template.
        """
        with self._compiling():
            return self._environment.from_string(self.text)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        try:
            yield
        except COMPILE_ERRORS as error:
            cure = "give a jinja template"
            raise ConfigError(
                f"{self._name} is not a chat template: {error}", field="chat_template", cure=cure
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Returns the prompt.

        Raises:
            InvalidRequest: the template refuses the conversation, or its output is too long.
            Misfit: the template fails on values of these types; values of other types may work.
        """
        given = {"documents": None, **variables, "range": _Ranges()}
        pieces: list[str] = []
        chars = 0
        try:
            for piece in self.compiled.generate(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **given
            ):
                chars += len(piece)
                if chars > PROMPT_CHARS_MAX:
                    raise InvalidRequest(
                        f"the rendered conversation has over {PROMPT_CHARS_MAX} characters", field="messages"
                    )
                pieces.append(piece)
        except (jinja2.UndefinedError, TypeError) as error:
            raise Misfit(str(error)) from error
        except RENDER_ERRORS as error:
            raise refused(error) from error
        return "".join(pieces)


def refused(error: Exception) -> InvalidRequest:
    cure = "change the messages to what the model's template accepts"
    return InvalidRequest(f"the chat template refuses the conversation: {error}", field="messages", cure=cure)


class _Generation(Extension):
    """Renders the content of `{% generation %}`, a block that marks the assistant's text for training, unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja's way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Macro) -> str:
        return caller()


class _Ranges:
    """`range` for one rendering, with a limit on the number of items."""

    def __init__(self) -> None:
        self._left = RANGE_ITEMS_MAX

    def __call__(self, *args: int) -> range:
        items = range(*args)
        self._left -= len(items)
        if self._left < 0:
            raise jinja2.exceptions.SecurityError(f"its ranges have over {RANGE_ITEMS_MAX} items together")
        return items


class _Dict:
    """`dict` for templates. It is not a class, so templates cannot reach a class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates, which refuses attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """Returns the environment of transformers' `apply_chat_template`."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    del environment.globals["lipsum"]  # random text
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment
