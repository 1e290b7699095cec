"""The handlers of `POST /v1/messages` and `/v1/messages/count_tokens`.

The headers `anthropic-version` and `anthropic-beta` have no effect.
"""

from typing import Any

import orjson
from starlette.responses import Response

from baton.gateway.http.answer_parts import OutputParts
from baton.gateway.http.anthropic.answer import MessageObject, MessageStream
from baton.gateway.http.anthropic.models import CountTokensRequest, MessagesRequest
from baton.gateway.http.anthropic.translate import to_chat, to_message
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import checked
from baton.gateway.http.chunks import receipt_json
from baton.gateway.http.counting import encode_chat
from baton.gateway.http.event_stream import HttpJob
from baton.gateway.text.chat.types import ChatRequest
from baton.protos.v1 import generation_pb2 as pb

# This API's names of our fields.
_FIELD_NAMES = {
    "prompt": "messages",
    "text": "messages",
    "stop": "stop_sequences",
    "grammar": "output_config.format.schema",
}


async def messages(call: HttpCall) -> Response:
    call.field_names = _FIELD_NAMES
    request, message, chat = await call.read_as(_understand)
    message.request_id = call.request_id
    written = MessageObject.of(
        request,
        id=f"msg_{call.request_id}",
        model=request.model or call.serving.model.name,
        write_receipt=receipt_json if call.wants_receipt or request.baton.receipt else None,
    )
    if request.stream:
        encoder = MessageStream(written, call.request_id, token_ids=bool(request.return_token_ids))
        return _named(call, call.stream(message, encoder, chat))
    answer = OutputParts()
    await call.serve([HttpJob(message, answer.collect, chat, answer.collect)])
    return _named(call, Response(written.ended(answer), media_type="application/json"))


async def count(call: HttpCall) -> Response:
    call.field_names = _FIELD_NAMES
    request, chat = await call.read_as(_understand_counted)
    call.serving.check_name(request.model)
    tokens = len(await encode_chat(call.serving, chat, is_request=True))
    return _named(call, Response(orjson.dumps({"input_tokens": tokens}), media_type="application/json"))


def _understand(body: dict[str, Any]) -> tuple[MessagesRequest, pb.GenerateRequest, ChatRequest]:
    request = checked(MessagesRequest, body)
    return request, to_message(request), to_chat(request)


def _understand_counted(body: dict[str, Any]) -> tuple[CountTokensRequest, ChatRequest]:
    request = checked(CountTokensRequest, body)
    return request, to_chat(request)


def _named(call: HttpCall, response: Response) -> Response:
    """Adds the header with the request's id that Anthropic's clients read."""
    response.headers["request-id"] = call.request_id
    return response
