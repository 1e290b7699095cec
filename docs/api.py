"""Writes the tables of docs/api.md and docs/structured-output.md from the code; `make docs` calls it.

A table stands between two comments; the text around it is written by hand.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from baton.core.sampling import SAMPLING_FIELDS
from baton.core.sampling_field import COMMANDS, HTTP, Door, Kind, SamplingField
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.baton_options import BatonOptions
from baton.gateway.http.bodies import ChatBody, CompletionBody
from baton.gateway.http.client_fields import IGNORED, NO_EFFECT
from baton.gateway.http.embeddings import EmbeddingsBody
from baton.gateway.http.rerank import RerankBody, ScoreBody
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.routes import ROUTES
from baton.grammar import schema, tags

PAGE = Path(__file__).resolve().parent / "api.md"
STRUCTURED = PAGE.with_name("structured-output.md")
POOLED = PAGE.with_name("embeddings.md")
_TABLE = re.compile(r"(?<=<!-- table: )(\w+) -->\n.*?(?=<!-- end -->)", re.DOTALL)

_REFUSED = ("suffix", "spaces_between_special_tokens")  # but for their defaults

# The tables' columns: who takes the parameter.
_BODIES: Mapping[str, type[BaseModel]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}

# The columns of the table of requests that generate nothing.
_POOLED: Mapping[str, type[BaseModel]] = {"embeddings": EmbeddingsBody, "rerank": RerankBody, "score": ScoreBody}
_POOLED_MEANINGS = {
    "input": "a text, token ids, or a list of either",
    "encoding_format": "`float`, or `base64` of little-endian float32",
    "query": "the text that documents should answer",
    "documents": "texts, or objects with a `text`",
    "baton.receipt": "add a receipt for each batch",
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
    "max_tokens": "chat: older name of `max_completion_tokens`; completions: default 16; messages: required",
    "top_logprobs": "alternatives for each token",
    "logprobs": "chat: whether to add logprobs; completions: alternatives for each token, 0 to 20",
    "tools": "functions that the model may call; chats: also custom tools; responses: also "
    "[other kinds](agents.md#tools)",
    "tool_choice": "auto, none, required (Anthropic: any) or one tool; chats and responses: also `allowed_tools`; "
    "all but auto are enforced",
    "parallel_tool_calls": "whether there may be several calls",
    "add_special_tokens": "add BOS to a text, default true; chats: only false, because their template writes it",
    "text": "`format`: what the output must be; `verbosity`: a variable of the template",
    "reasoning": "`effort`: none turns reasoning off where the template can; `summary` is ignored; chats: also "
    "`enabled` and `exclude`",
    "include": "`message.output_text.logprobs`, `reasoning.encrypted_content`; others have no effect",
    "store": "responses: keep the answer, so that `previous_response_id` continues it, default true; others ignore it",
    "previous_response_id": "the [stored answer](agents.md#stored-answers) that this one continues",
    "truncation": "auto: leave out the oldest turns that do not fit",
    "thinking": "`type`: enabled, adaptive, disabled or (messages) between_tools; chats: also true or false; the "
    "budget is not enforced",
    "output_config": "`effort`, `format`; `task_budget` has no effect",
    "cache_control": "every prefix is cached; `ttl`: how long [stores](kept-kv.md#keep-times) keep it",
    "user": IGNORED,
    "metadata": IGNORED,
    "safety_identifier": IGNORED,
    "service_tier": IGNORED,
    "max_tool_calls": IGNORED,
    "prompt_cache_key": "the session, if `baton.session_id` gives none",
    "promptCacheKey": "other name of `prompt_cache_key`",
    "client_metadata": IGNORED,
    "access_programs": IGNORED,
    "prompt_cache_retention": "`24h` or `in_memory`: how long [stores](kept-kv.md#keep-times) keep the KV",
    "prompt_cache_options": IGNORED,
    "inference_geo": IGNORED,
    "billing_policy": IGNORED,
    "fallback_credit_token": IGNORED,
    "betas": IGNORED,
    "anthropic_beta": IGNORED,
    "anthropic_version": IGNORED,
}


def page(path: Path = PAGE) -> str:
    """The text of a page, with its tables made anew."""
    made = tables()
    return _TABLE.sub(lambda found: f"{found[1]} -->\n{made[found[1]]}\n", path.read_text())


def tables() -> Mapping[str, str]:
    """All tables, by the names of their places."""
    return {
        "endpoints": _endpoints(),
        "parameters": _parameters(),
        "pooled": _pooled(),
        "sampling": _sampling(),
        "refused_parameters": _refused(),
        "keywords": _names(schema.SUPPORTED),
        "refused_keywords": _names(schema.REFUSED),
        "formats": _names(schema.FORMATS),
        "tag_formats": _names(tags.FORMATS),
    }


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
        if field.annotation is BatonOptions:
            yield from (_Parameter(f"baton.{each}", option) for each, option in BatonOptions.model_fields.items())
        else:
            yield _Parameter(field.alias or name, field)


def _parameters() -> str:
    taken: dict[str, dict[str, _Parameter]] = {}
    sampling = {each.name_at(door) for each in SAMPLING_FIELDS.values() for door in HTTP if door not in each.by_hand}
    for column, body in _BODIES.items():
        for parameter in _of(body):
            if not parameter.refusal and parameter.name not in ("model", *_REFUSED, *sampling):
                taken.setdefault(parameter.name, {})[column] = parameter
    ignored, unheeded = (
        [name for name, of in taken.items() if all(each.meaning == meaning for each in of.values())]
        for meaning in (IGNORED, NO_EFFECT)
    )
    rows = []
    for name, of in taken.items():
        marks = " | ".join("x" if column in of else "" for column in _BODIES)
        if name not in (*ignored, *unheeded):
            rows.append(f"| `{name}` | {marks} | {next(iter(of.values())).meaning} |")
    head = [f"| parameter | {' | '.join(_BODIES)} | meaning |", "|---|" + ":-:|" * len(_BODIES) + "---|"]
    without_warning = f"Accepted and ignored, because they change no token: {_names(ignored)}."
    with_warning = (
        f"Accepted without effect, and named in a header `x-baton-warning` of the answer: {_names(unheeded)}."
    )
    return "\n".join([*head, *rows, "", without_warning, "", with_warning])


def _pooled() -> str:
    rows: dict[str, tuple[dict[str, str], str]] = {}
    for column, body in _POOLED.items():
        fields = {
            name: field.description for name, field in body.model_fields.items() if name not in ("model", "baton")
        }
        for name, description in (fields | {"baton.receipt": ""}).items():
            meaning = _POOLED_MEANINGS.get(name) or description
            assert meaning, f"{name} needs a description"
            rows.setdefault(name, ({}, meaning))[0][column] = "x"
    lines = [
        f"| `{name}` | {' | '.join(marks.get(column, '') for column in _POOLED)} | {meaning} |"
        for name, (marks, meaning) in rows.items()
    ]
    return "\n".join([f"| parameter | {' | '.join(_POOLED)} | meaning |", "|---|" + ":-:|" * 3 + "---|", *lines])


def _sampling() -> str:
    doors = [door for door in Door if door is not Door.GENERATION_CONFIG]
    rows = []
    for field in SAMPLING_FIELDS.values():
        cells = " | ".join(_cell(field, door) for door in doors)
        rows.append(f"| `{field.name}` | {cells} | {_meaning(field)} | {_unset(field)} |")
    head = [f"| parameter | {' | '.join(doors)} | meaning | if unset |", "|---|" + ":-:|" * len(doors) + "---|---|"]
    return "\n".join([*head, *rows])


def _cell(field: SamplingField, door: Door) -> str:
    if door not in field.doors:
        return ""
    if door in COMMANDS:
        return f"`--{field.name.replace('_', '-')}`"
    return "x" if field.name_at(door) == field.name else f"`{field.name_at(door)}`"


def _meaning(field: SamplingField) -> str:
    most = "" if field.items_max is None else f"up to {field.items_max}"
    return "; ".join(filter(None, [field.meaning, field.bounds and field.bounds.text, most]))


def _unset(field: SamplingField) -> str:
    if Door.GENERATION_CONFIG in field.doors:
        return f"generation_config.json's, else {field.default:g}"
    if field.kind is Kind.FLAG:
        return "true" if field.default else "false"
    return field.unset or (
        f"{field.default:g}" if field.kind in (Kind.INTEGER, Kind.NUMBER) and field.default is not None else "none"
    )


def _refused() -> str:
    rows: dict[tuple[str, str], str] = {}
    bodies: Mapping[str, type[BaseModel]] = {
        "/v1/chat/completions": ChatBody,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": MessagesRequest,
    }
    for path, body in bodies.items():
        for parameter in _of(body):
            if parameter.refusal:
                rows[path, parameter.name] = parameter.refusal
    lines = [f"| `{path}` | `{name}` | {cure} |" for (path, name), cure in rows.items()]
    return "\n".join(["| endpoint | parameter | instead |", "|---|---|---|", *lines])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    for each in (PAGE, STRUCTURED, POOLED):
        each.write_text(page(each))
