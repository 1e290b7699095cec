"""What a client's request and its events are on the wire."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from baton.client.outputs import ChatDelta, Event, Finished, Notice, Piece, ToolCall
from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1 import operations_pb2
from baton.rpc.convert import (
    finish_reason_from_proto,
    prompt_logprobs_from_proto,
    receipt_from_proto,
    sampling_to_proto,
    token_from_proto,
    usage_from_proto,
)

# How to choose tokens; a mapping has the names of SamplingParams. What is unset is up to the gateway.
Sampling = SamplingParams | Mapping[str, Any] | None


class Options(TypedDict, total=False):
    """What every request takes; `GenerateRequest` on the wire describes the fields. `timeout_s`: None: no deadline;
    `ttft_s`, `tpot_s`: see `baton.core.types.Slo`; None: the gateway's."""

    model: str
    request_id: str
    cache_salt: str
    timeout_s: float | None
    priority: int
    ttft_s: float | None
    tpot_s: float | None
    session_id: str
    n: int
    best_of: int
    truncate_prompt_tokens: int
    add_special_tokens: bool


def request_message(sampling: Sampling, options: Options) -> pb.GenerateRequest:
    """The request without its prompt.

    Raises:
        InvalidRequest: a value cannot be sent.
        TypeError: there is no such sampling parameter.
    """
    request = pb.GenerateRequest()
    if sampling is not None:
        params = sampling if isinstance(sampling, SamplingParams) else SamplingParams(**sampling)
        request.sampling.CopyFrom(sampling_to_proto(params))
    for name, value in options.items():
        if isinstance(value, str):
            set_text(request, **{name: value})
        elif name != "timeout_s" and value is not None:
            try:
                setattr(request.slo if name in ("ttft_s", "tpot_s") else request, name, value)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{name} is {value!r}: {error}", field=name, value=value) from None
    return request


def json_text(field: str, value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{field} cannot be sent: {error}", field=field, cure="give what JSON can express"
        ) from None
    return text


def set_text(
    message: pb.GenerateRequest | pb.TokenizeRequest | operations_pb2.SwitchNodeRoleRequest, **texts: str
) -> None:
    """Fills fields of the message.

    Raises:
        InvalidRequest: a text is not valid Unicode, such as a wrongly decoded argument or file.
    """
    for name, text in texts.items():
        try:
            setattr(message, name, text)
        except UnicodeEncodeError as error:
            field = "prompt" if name == "text" else name
            cure = "give text that is valid UTF-8"
            raise InvalidRequest(f"the {field} cannot be sent: {error}", field=field, cure=cure) from None


def token_ids_message(prompt: Sequence[int]) -> pb.TokenIds:
    try:
        return pb.TokenIds(ids=prompt)
    except ValueError as error:
        raise InvalidRequest(f"the prompt's token ids cannot be sent: {error}", field="prompt") from None


def event_from_message(response: pb.GenerateResponse) -> Event:
    if response.notice:
        return Notice(response.notice)
    tokens = tuple(token_from_proto(token) for token in response.tokens)
    chat = _chat_delta(response.chat) if response.HasField("chat") else None
    prompt_logprobs = prompt_logprobs_from_proto(response.prompt_logprobs)
    finish_reason = finish_reason_from_proto(response.finish_reason)
    if finish_reason is None:
        return Piece(response.text, tokens, response.index, chat, prompt_logprobs)
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
    )


def _chat_delta(message: pb.ChatDelta) -> ChatDelta:
    calls = (ToolCall(call.index, call.id, call.name, call.arguments) for call in message.tool_calls)
    return ChatDelta(message.content, message.reasoning, tuple(calls))
