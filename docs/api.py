"""Writes the tables of docs/api.md and docs/structured-output.md from the code; `make docs` calls it.

A table stands between two comments; the text around it is written by hand.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.core.types import SamplingParams
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.bodies import IGNORED, ChatBody, CompletionBody
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.routes import ROUTES
from baton.grammar import schema, tags

PAGE = Path(__file__).resolve().parent / "api.md"
STRUCTURED = PAGE.with_name("structured-output.md")
_TABLE = re.compile(r"(?<=<!-- table: )(\w+) -->\n.*?(?=<!-- end -->)", re.DOTALL)

_REFUSED = ("suffix", "spaces_between_special_tokens")  # but for their defaults

# The tables' columns: who takes the parameter.
_BODIES: Mapping[str, type[BaseModel]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}

# What parameters mean whose models do not say it, or say it for one body only.
_MEANINGS = {
    "messages": "the conversation",
    "prompt": "a text, token ids, or a list of either",
    "input": "the conversation: a text, or items",
    "instructions": "the first system message",
    "system": "the first system message",
    "max_output_tokens": "default: what the context leaves",
    "stream": "answer as server-sent events",
    "stream_options": "`include_usage`, `continuous_usage_stats`; `include_obfuscation` is ignored",
    "seed": "the same seed draws the same tokens",
    "temperature": "divides logits",
    "max_tokens": "chat: older name of `max_completion_tokens`; completions: default 16; messages: required",
    "top_p": "draw from the most probable tokens of this total probability",
    "min_p": "draw from tokens of at least this share of the best one's probability",
    "presence_penalty": "subtracted from logits of tokens that the output has",
    "frequency_penalty": "subtracted for each time that the output has the token",
    "repetition_penalty": "divides logits of tokens that prompt or output have",
    "logit_bias": "added to logits; up to 1024 token ids as strings, -100 to 100",
    "stop": "texts that end the output; up to 16",
    "stop_sequences": "texts that end the output; up to 16",
    "stop_token_ids": "tokens that end the output",
    "include_stop_str_in_output": "keep the text or token that ended the output",
    "min_tokens": "no end before this many tokens; up to the limit of tokens",
    "ignore_eos": "go on after the token that ends a text",
    "skip_special_tokens": "leave special tokens out of the text",
    "truncate_prompt_tokens": "keep this many tokens of the prompt's end",
    "prompt_logprobs": "alternatives for each prompt token; not with `stream`",
    "response_format": "what the output must be",
    "structured_outputs": "what the output must be, in vLLM's words",
    "guided_json": "older form of `structured_outputs.json`",
    "guided_regex": "older form of `structured_outputs.regex`",
    "guided_choice": "older form of `structured_outputs.choice`",
    "guided_grammar": "older form of `structured_outputs.grammar`",
    "top_logprobs": "alternatives for each token",
    "logprobs": "chat: whether to add logprobs; completions: alternatives for each token, 0 to 20",
    "tools": "functions that the model may call",
    "tool_choice": "auto, none, required (Anthropic: any) or one tool; all but auto are enforced",
    "parallel_tool_calls": "whether there may be several calls",
    "include_reasoning": "whether the answer has the reasoning",
    "add_generation_prompt": "write the beginning of the answer; default: unless the last message goes on",
    "continue_final_message": "the output continues the last message",
    "modalities": "only text",
    "best_of": "draw so many outputs, return the `n` most probable; not with `stream`",
    "add_special_tokens": "add BOS to a text, default true; chats: only false, because their template writes it",
    "text": "`format`: what the output must be; `verbosity`: a variable of the template",
    "reasoning": "`effort`: none turns reasoning off where the template can; `summary` is ignored",
    "include": "`message.output_text.logprobs`",
    "truncation": "auto: leave out the oldest turns that do not fit",
    "thinking": "enabled, adaptive or disabled; the budget is not enforced",
    "output_config": "`effort`, `format`",
    "cache_control": "accepted: every prefix is cached",
    "user": IGNORED,
    "metadata": IGNORED,
    "safety_identifier": IGNORED,
    "service_tier": IGNORED,
    "max_tool_calls": IGNORED,
    "prompt_cache_key": IGNORED,
    "prompt_cache_retention": IGNORED,
    "prompt_cache_options": IGNORED,
    "inference_geo": IGNORED,
}


def page(path: Path = PAGE) -> str:
    """The text of a page, with its tables made anew."""
    tables = {
        "endpoints": _endpoints(),
        "parameters": _parameters(),
        "refused_parameters": _refused(),
        "keywords": _names(schema.SUPPORTED),
        "refused_keywords": _names(schema.REFUSED),
        "formats": _names(schema.FORMATS),
        "tag_formats": _names(tags.FORMATS),
    }
    return _TABLE.sub(lambda found: f"{found[1]} -->\n{tables[found[1]]}\n", path.read_text())


def _endpoints() -> str:
    rows = [
        f"| `{route.method} {route.path.replace(':path', '')}` | {route.summary} |" for route in ROUTES if route.listed
    ]
    return "\n".join(["| endpoint | |", "|---|---|", *rows])


@dataclass(frozen=True)
class _Parameter:
    """One parameter of one body."""

    name: str
    field: FieldInfo

    @property
    def refusal(self) -> str:
        """What to do instead; empty: the parameter is taken."""
        for each in self.field.metadata:
            if isinstance(each, BeforeValidator):
                try:
                    each.func(object())  # type: ignore[call-arg]
                except PydanticCustomError as error:
                    return str(error.context["cure"] if error.context else "")
        return ""

    @property
    def meaning(self) -> str:
        meaning = _MEANINGS.get(self.name) or self.field.description
        assert meaning is not None, f"{self.name} needs a description"
        return meaning


def _of(body: type[BaseModel]) -> Iterator[_Parameter]:
    for name, field in body.model_fields.items():
        yield _Parameter(field.alias or name, field)


def _parameters() -> str:
    taken: dict[str, dict[str, _Parameter]] = {}
    for column, body in _BODIES.items():
        for parameter in _of(body):
            if not parameter.refusal and parameter.name not in ("model", *_REFUSED):
                taken.setdefault(parameter.name, {})[column] = parameter
    ignored = [name for name, of in taken.items() if all(each.meaning == IGNORED for each in of.values())]
    rows = []
    for name, of in taken.items():
        marks = " | ".join("x" if column in of else "" for column in _BODIES)
        meaning = "; ".join(filter(None, [next(iter(of.values())).meaning, _range(name)]))
        if name not in ignored:
            rows.append(f"| `{name}` | {marks} | {meaning} |")
    head = [f"| parameter | {' | '.join(_BODIES)} | meaning |", "|---|" + ":-:|" * len(_BODIES) + "---|"]
    return "\n".join([*head, *rows, "", f"Accepted and ignored, because they change no token: {_names(ignored)}."])


def _range(name: str) -> str:
    """What all doors allow, as the error says it."""
    if name not in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"):
        return "0 to 20" if name in ("prompt_logprobs", "top_logprobs") else ""
    wrong: dict[str, Any] = {name: math.nan}
    try:
        SamplingParams(**wrong)
    except InvalidRequest as error:
        return error.allowed[0]
    raise AssertionError(name)


def _refused() -> str:
    rows: dict[tuple[str, str], str] = {}
    for path, body in (("/v1/responses", ResponsesRequest), ("/v1/messages", MessagesRequest)):
        for parameter in _of(body):
            if parameter.refusal:
                rows[path, parameter.name] = parameter.refusal
    lines = [f"| `{path}` | `{name}` | {cure} |" for (path, name), cure in rows.items()]
    return "\n".join(["| endpoint | parameter | instead |", "|---|---|---|", *lines])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    for each in (PAGE, STRUCTURED):
        each.write_text(page(each))
