"""Translates a client's requests to protobuf messages, and messages to events."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from baton.client.outputs import ChatDelta, Event, Finished, Notice, Piece, ToolCall
from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.protos.v1 import common_pb2, operations_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import (
    finish_reason_from_proto,
    prompt_logprobs_from_proto,
    receipt_from_proto,
    sampling_to_proto,
    token_from_proto,
    usage_from_proto,
)

# How to choose tokens; a mapping uses the names of SamplingParams. The gateway fills in what is unset.
Sampling = SamplingParams | Mapping[str, Any] | None


class Options(TypedDict, total=False):
    """Options of every request. `GenerateRequest` in generation.proto documents each field.

    Attributes:
        model: the served model or one of its adapters; empty: the served model.
        timeout_s: seconds for the whole request, retries included; None: no deadline.
        kv_keep_s: seconds for which nodes keep the KV outside of their caches; 0: the session is over.
        ttft_s, tpot_s: seconds to the first token and per further token, see `Slo`; None: the gateway's.
    """

    model: str
    request_id: str
    cache_salt: str
    timeout_s: float | None
    priority: int
    ttft_s: float | None
    tpot_s: float | None
    session_id: str
    kv_keep_s: float | None
    best_of: int
    truncate_prompt_tokens: int
    add_special_tokens: bool


class StreamOptions(Options, total=False):
    """`Options` plus the number of outputs, `n`."""

    n: int


class ChatOptions(Options, total=False):
    """`Options` plus those of a conversation. `Chat` in generation.proto documents each field."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    template_kwargs: Mapping[str, Any]
    continue_final_message: bool
    parallel_tool_calls: bool


class ChatStreamOptions(ChatOptions, total=False):
    """`ChatOptions` plus the number of outputs, `n`."""

    n: int


def generate_message(prompt: str | Sequence[int], sampling: Sampling, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Builds the request for a prompt, with `StreamOptions`.

    Raises:
        TypeError: an option or sampling parameter does not exist.
        InvalidRequest: a value cannot be sent.
    """
    _check_names(options, StreamOptions.__optional_keys__)
    request = _request_message(sampling, options)
    if isinstance(prompt, str):
        set_text(request, text=prompt)
    else:
        request.token_ids.CopyFrom(token_ids_message(prompt))
    return request


def chat_message(
    messages: Sequence[Mapping[str, Any]], sampling: Sampling, options: Mapping[str, Any]
) -> pb.GenerateRequest:
    """Builds the request for a conversation, with `ChatStreamOptions`.

    Raises:
        TypeError: an option or sampling parameter does not exist.
        InvalidRequest: a value cannot be sent.
    """
    _check_names(options, ChatStreamOptions.__optional_keys__)
    of_chat = ChatOptions.__optional_keys__ - Options.__optional_keys__
    request = _request_message(sampling, {name: value for name, value in options.items() if name not in of_chat})
    chat = request.chat
    chat.messages_json = json_text("messages", list(messages))
    chat.tools_json = json_text("tools", list(options["tools"])) if options.get("tools") else ""
    chat.tool_choice_json = json_text("tool_choice", options.get("tool_choice", "auto"))
    chat.template_kwargs_json = json_text("template_kwargs", dict(options.get("template_kwargs") or {}))
    chat.continue_final_message = options.get("continue_final_message", False)
    chat.parallel_tool_calls = options.get("parallel_tool_calls", True)
    return request


def _check_names(options: Mapping[str, Any], allowed: frozenset[str]) -> None:
    for name in options:
        if name not in allowed:
            is_sampling = name in {each.name for each in fields(SamplingParams)}
            cure = f'; give it as sampling: {{"{name}": ...}}' if is_sampling else ""
            raise TypeError(f"there is no option {name!r}{cure}; allowed: {', '.join(sorted(allowed))}")


def _request_message(sampling: Sampling, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Builds a request without its prompt."""
    request = pb.GenerateRequest()
    if sampling is not None:
        request.sampling.CopyFrom(sampling_to_proto(_sampling_params(sampling)))
    for name, value in options.items():
        if value is None:
            continue
        if name == "timeout_s":
            _check_seconds(name, value)
            continue
        part = request.slo if name in ("ttft_s", "tpot_s") else request
        try:
            if isinstance(value, str):
                set_text(part, **{name: value})
            else:
                setattr(part, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} is {value!r}: {error}", field=name, value=value) from None
    if options.get("n") == 0:  # on the wire, 0 is unset
        raise InvalidRequest("n is 0", field="n", value=0, allowed=("1 or more",))
    return request


def _sampling_params(sampling: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling
    if not isinstance(sampling, Mapping):
        raise TypeError(f"sampling is {sampling!r}; allowed: SamplingParams, or a mapping with the names of its fields")
    return SamplingParams(**sampling)


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or math.isnan(value):
        raise InvalidRequest(f"{name} is {value!r}", field=name, value=value, allowed=("a number of seconds",))


def json_text(field: str, value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{field} cannot be sent: {error}", field=field, cure="use only values that JSON can express"
        ) from None
    return text


def set_text(
    message: pb.GenerateRequest
    | common_pb2.Slo
    | pb.TokenizeRequest
    | operations_pb2.SwitchNodeRoleRequest
    | operations_pb2.DropKvRequest,
    **texts: str,
) -> None:
    """Sets text fields of the message.

    Raises:
        InvalidRequest: a text cannot be encoded as UTF-8, for example because a file was decoded wrongly.
    """
    for name, text in texts.items():
        try:
            setattr(message, name, text)
        except UnicodeEncodeError as error:
            field = "prompt" if name == "text" else name
            cure = "give text that is valid UTF-8"
            raise InvalidRequest(f"the {field} cannot be sent: {error}", field=field, cure=cure) from None


def token_ids_message(prompt: Sequence[int]) -> pb.TokenIds:
    if prompt is None or isinstance(prompt, bytes | bytearray):  # gRPC takes them for token ids
        raise InvalidRequest(f"the prompt is {prompt!r:.100}", field="prompt", allowed=("text", "a list of token ids"))
    try:
        return pb.TokenIds(ids=prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the token ids cannot be sent: {error}", field="prompt") from None


def event_from_message(response: pb.GenerateResponse, request_id: str) -> Event:
    if response.notice:
        return Notice(response.notice, request_id)
    tokens = tuple(token_from_proto(token) for token in response.tokens)
    chat = _chat_delta(response.chat) if response.HasField("chat") else None
    prompt_logprobs = prompt_logprobs_from_proto(response.prompt_logprobs)
    finish_reason = finish_reason_from_proto(response.finish_reason)
    if finish_reason is None:
        return Piece(response.text, tokens, response.index, chat, prompt_logprobs, request_id)
    return Finished(
        text=response.text,
        finish_reason=finish_reason,
        stop_reason=response.stop_reason,
        usage=usage_from_proto(response.usage),
        receipt=receipt_from_proto(response.receipt),
        tokens=tokens,
        index=response.index,
        chat=chat,
        prompt_logprobs=prompt_logprobs,
        request_id=request_id,
    )


def _chat_delta(message: pb.ChatDelta) -> ChatDelta:
    calls = (ToolCall(call.index, call.id, call.name, call.arguments) for call in message.tool_calls)
    return ChatDelta(message.content, message.reasoning, tuple(calls))
