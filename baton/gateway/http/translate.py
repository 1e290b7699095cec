"""Translates the bodies of OpenAI's endpoints to requests of `baton.gateway.serving.serving`. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from baton.core.errors import InvalidRequest
from baton.core.sampling_field import Door
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.allowed_tools import ChatAllowedTools
from baton.gateway.http.bodies import ChatBody, CompletionBody, GenerationBody, ResponseFormat, StructuredOutputs
from baton.gateway.http.common_fields import fill, reasoning_variables
from baton.gateway.http.custom_tools import allowed_names, custom_tools, with_functions
from baton.gateway.http.keep_time import longest_ttl, set_keep_time
from baton.gateway.text.chat.json_request import chat_request as conversation
from baton.gateway.text.chat.types import ChatRequest
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import grammar_to_proto

_CONVERSATION = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)


def chat_request(body: ChatBody) -> ChatRequest:
    """Translates the conversation of a chat's body.

    Raises:
        InvalidRequest: a field has a wrong shape, or two fields exclude each other.
    """
    custom = custom_tools(body.tools, body.tool_choice)
    given = with_functions({name: getattr(body, name) for name in _CONVERSATION})
    kwargs = {**body.template_variables, **body.chat_template_kwargs}
    thinking = kwargs.get("enable_thinking", kwargs.get("thinking", body.thinks))
    effort = body.reasoning_effort or (None if body.reasoning is None else body.reasoning.effort)
    variables = reasoning_variables(effort=None if effort == "default" else effort, thinking=thinking)
    given["chat_template_kwargs"] = {**variables, **kwargs}
    chat = conversation(given, custom.grammar or grammar_of(body)[0])
    if isinstance(body.tool_choice, ChatAllowedTools):
        names = allowed_names(body.tool_choice, body.tools)
        chat = replace(chat, tools=[tool for tool in chat.tools if tool["function"]["name"] in names])
    return replace(chat, raw_tool=custom.raw_tool)


def lone_results(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a warning for the first result of a tool without a call before it that it may answer."""
    calls: set[str | None] = set()
    for index, message in enumerate(messages):
        calls.update(call.get("id") for call in message.get("tool_calls") or ())
        named = message.get("tool_call_id")
        # Clients of models without ids leave them out.
        if message["role"] == "tool" and not (named in calls or (calls and (named is None or None in calls))):
            return [
                f"messages[{index}].tool_call_id names no call before it: the model sees a result without its call, "
                "and OpenAI's API refuses it"
            ]
    return []


def chat_message(body: ChatBody, request_id: str) -> pb.GenerateRequest:
    """Translates all of a chat's body but the conversation."""
    message = _message(body, request_id, Door.CHAT)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        message.sampling.max_tokens = max_tokens
    if body.logprobs:
        message.sampling.logprobs = body.top_logprobs or 0
    return message


def completion_messages(body: CompletionBody, request_id: str) -> list[pb.GenerateRequest]:
    """Returns one request per prompt. If there are several, their ids end in a number."""
    prompts = body.prompts
    grammar, _ = grammar_of(body)
    first = _message(body, request_id, Door.COMPLETIONS)
    first.add_special_tokens = body.add_special_tokens
    first.best_of = body.best_of or 0
    if body.max_tokens is not None:
        first.sampling.max_tokens = max(1, body.max_tokens)  # if 0 are asked for, one is generated and not shown
    if body.logprobs is not None:
        first.sampling.logprobs = body.logprobs
        if body.echo:
            first.sampling.prompt_logprobs = max(body.logprobs, first.sampling.prompt_logprobs)
    if grammar is not None:
        first.sampling.grammar.CopyFrom(grammar_to_proto(grammar))
    messages = []
    for number, prompt in enumerate(prompts):
        message = pb.GenerateRequest()
        message.CopyFrom(first)
        if len(prompts) > 1:
            message.request_id = f"{request_id}-{number}"
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.ids.extend(prompt)
        messages.append(message)
    return messages


def grammar_of(body: GenerationBody) -> tuple[Grammar | None, str]:
    """Returns the output's constraint, if any, and the field that gives it.

    Raises:
        InvalidRequest: several fields give a constraint.
    """
    given = [(field, grammar) for field, grammar in _grammars(body) if grammar is not None]
    if len(given) > 1:
        names = " and ".join(field for field, _ in given)
        raise InvalidRequest(f"{names} exclude each other", field=given[1][0], cure="give only one of them")
    if not given:
        return None, "tools"  # forced calls have a grammar too
    field, grammar = given[0]
    return grammar, field


def _message(body: GenerationBody, request_id: str, door: Door) -> pb.GenerateRequest:
    message = pb.GenerateRequest(request_id=request_id, model=body.model, n=body.n)
    if body.truncate_prompt_tokens is not None:
        message.truncate_prompt_tokens = body.truncate_prompt_tokens
    fill(message, body, door)
    parts: list[object] = [{"cache_control": body.cache_control}]
    if isinstance(body, ChatBody):
        parts += [*body.messages, *body.tools]
    retention = body.prompt_cache_retention or longest_ttl(parts)
    set_keep_time(message, cache_key=body.prompt_cache_key or body.promptCacheKey, retention=retention)
    return message


def _grammars(body: GenerationBody) -> list[tuple[str, Grammar | None]]:
    guided = StructuredOutputs.model_construct(
        json_=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    return [
        ("response_format", _of_format(body.response_format)),
        *((f"guided_{name}", grammar) for name, grammar in _of_structured(guided)),
        *((f"structured_outputs.{name}", grammar) for name, grammar in _of_structured(body.structured_outputs)),
    ]


def _of_format(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if wanted.type == "json_schema":
        assert wanted.json_schema is not None
        schema = wanted.json_schema.json_schema
        return Grammar(GrammarKind.JSON_OBJECT) if schema is None else Grammar(GrammarKind.JSON_SCHEMA, _dumps(schema))
    return Grammar(GrammarKind.STRUCTURAL_TAG, _dumps(wanted.model_dump(exclude_unset=True, exclude={"json_schema"})))


def _of_structured(wanted: StructuredOutputs | None) -> list[tuple[str, Grammar | None]]:
    if wanted is None:
        return []
    schema = wanted.json_ if wanted.json_ is None or isinstance(wanted.json_, str) else _dumps(wanted.json_)
    choice = None if wanted.choice is None else _dumps(wanted.choice)
    language = GrammarKind.GBNF if "::=" in (wanted.grammar or "") else GrammarKind.LARK
    return [
        ("json", _grammar(GrammarKind.JSON_SCHEMA, schema)),
        ("regex", _grammar(GrammarKind.REGEX, wanted.regex)),
        ("choice", _grammar(GrammarKind.CHOICE, choice)),
        ("grammar", _grammar(language, wanted.grammar)),
        ("json_object", Grammar(GrammarKind.JSON_OBJECT) if wanted.json_object else None),
        ("structural_tag", _grammar(GrammarKind.STRUCTURAL_TAG, wanted.structural_tag)),
    ]


def _grammar(kind: GrammarKind, text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
