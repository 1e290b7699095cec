"""The handlers of `POST /v1/messages` and `/v1/messages/count_tokens`.

The header `anthropic-version` has no effect. Of `anthropic-beta`, interleaved thinking allows larger budgets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response

from baton.core.errors import InvalidRequest
from baton.gateway.http.answer_parts import OutputParts
from baton.gateway.http.anthropic.answer import MessageObject, MessageStream, counted, without_output
from baton.gateway.http.anthropic.models import CountTokensRequest, MessagesRequest
from baton.gateway.http.anthropic.no_effect import without_effect
from baton.gateway.http.anthropic.translate import to_chat, to_message
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import checked
from baton.gateway.http.chunks import receipt_json
from baton.gateway.http.counting import encode_chat
from baton.gateway.http.event_stream import HttpJob
from baton.gateway.text.chat.types import ChatRequest
from baton.protos.v1 import generation_pb2 as pb

_INTERLEAVED = "interleaved-thinking-"  # a beta's name, up to its date

Push = Callable[[pb.GenerateResponse], bytes]

# This API's names of our fields.
_FIELD_NAMES = {
    "prompt": "messages",
    "text": "messages",
    "stop": "stop_sequences",
    "grammar": "output_config.format.schema",
}


async def messages(call: HttpCall) -> Response:
    call.field_names = _FIELD_NAMES
    understood = await call.read_as(partial(_understand, betas=call.request.headers.get("anthropic-beta", "")))
    request, message = understood.request, understood.message
    _warn(call, understood.warnings)
    message.request_id = call.request_id
    written = MessageObject.of(
        request,
        id=call.new_answer_id("msg_", resumable=bool(request.return_token_ids)),
        model=request.model or call.serving.model.name,
        write_receipt=receipt_json if call.wants_receipt or request.baton.receipt else None,
    )
    if request.stream:
        encoder = MessageStream(written, call.request_id, token_ids=bool(request.return_token_ids))
        job = HttpJob(message, _push(request, encoder.push), understood.chat, encoder.skip)
        return _named(call, call.stream_all([job], encoder))
    answer = OutputParts()
    await call.serve([HttpJob(message, _push(request, answer.collect), understood.chat, answer.collect)])
    return _named(call, Response(written.ended(answer), media_type="application/json"))


def _push(request: MessagesRequest, push: Push) -> Push:
    return push if request.max_tokens else lambda message: push(without_output(message))


async def count(call: HttpCall) -> Response:
    """Counts a prompt's tokens, also of one that is a little too long: clients shorten it by the count."""
    call.field_names = _FIELD_NAMES
    request, chat, warnings = await call.read_as(_understand_counted)
    _warn(call, warnings)
    call.serving.check_name(request.model)
    tokens = len(await encode_chat(call.serving, chat, is_request=True))
    if not tokens:
        cure = "give a message some text"
        raise InvalidRequest("the prompt has no tokens", field="messages", allowed=("1 token or more",), cure=cure)
    return _named(call, Response(orjson.dumps(counted(request, tokens)), media_type="application/json"))


@dataclass(frozen=True)
class _Understood:
    request: MessagesRequest
    message: pb.GenerateRequest
    chat: ChatRequest
    warnings: list[str]


def _understand(body: dict[str, Any], *, betas: str) -> _Understood:
    request = checked(MessagesRequest, body)
    named = (*betas.split(","), *(request.betas or ()), *(request.anthropic_beta or ()))
    interleaved = any(beta.strip().startswith(_INTERLEAVED) for beta in named)
    message = to_message(request, interleaved=interleaved)
    return _Understood(request, message, to_chat(request), without_effect(request))


def _understand_counted(body: dict[str, Any]) -> tuple[CountTokensRequest, ChatRequest, list[str]]:
    request = checked(CountTokensRequest, body)
    return request, to_chat(request), without_effect(request)


def _warn(call: HttpCall, warnings: list[str]) -> None:
    for text in warnings:
        call.warn(text)


def _named(call: HttpCall, response: Response) -> Response:
    """Adds the header with the request's id that Anthropic's clients read."""
    response.headers["request-id"] = call.request_id
    return response
