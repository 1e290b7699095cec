"""The handler of `POST /v1/responses`."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from baton.core.errors import ContextOverflow
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import checked
from baton.gateway.http.chunks import receipt_json
from baton.gateway.http.counting import encode_chat
from baton.gateway.http.event_stream import HttpJob
from baton.gateway.http.logprobs import LogprobWriter
from baton.gateway.http.responses.answer import Identity, ResponseObject
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.responses.stream import ResponsesStream
from baton.gateway.http.responses.translate import to_chat, to_message, wants_logprobs
from baton.gateway.text.chat.types import ChatRequest, Json
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb

Count = Callable[[Sequence[Json]], Awaitable[int]]
# This API's names of our fields.
_FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "text": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "grammar": "text.format.schema",
}


async def responses(call: HttpCall) -> Response:
    call.field_names = _FIELD_NAMES
    request, message, chat = await call.read_as(_understand)
    message.request_id = call.request_id
    if request.truncation == "auto":
        chat = await _fitting(call, request, chat)
    response = ResponseObject(request, _identity(call, request))
    if request.stream:
        return call.stream(message, ResponsesStream(response, token_ids=bool(request.return_token_ids)), chat)
    answer = response.answer()
    await call.serve([HttpJob(message, answer.collect, chat, answer.collect)])
    return Response(response.ended(answer), media_type="application/json")


def _understand(body: dict[str, Any]) -> tuple[ResponsesRequest, pb.GenerateRequest, ChatRequest]:
    request = checked(ResponsesRequest, body)
    return request, to_message(request), to_chat(request)


def _identity(call: HttpCall, request: ResponsesRequest) -> Identity:
    def write_logprobs(tokens: Sequence[common_pb2.Token]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = writer.chat(tokens)["content"]
        return content

    writer = LogprobWriter(call.serving.model.tokenizer, as_ids=False)
    return Identity(
        key=call.request_id,
        model=request.model or call.serving.model.name,
        created_at=int(time.time()),
        write_logprobs=write_logprobs if wants_logprobs(request) else None,
        write_receipt=receipt_json if call.wants_receipt or request.baton.receipt else None,
    )


async def _fitting(call: HttpCall, request: ResponsesRequest, chat: ChatRequest) -> ChatRequest:
    """Drops the conversation's oldest turns if it would leave too little room for the output."""

    async def count(messages: Sequence[Json]) -> int:
        try:
            return len(await encode_chat(call.serving, replace(chat, messages=messages)))
        except ContextOverflow:
            return tokens_max + 1  # the text is longer than any prompt may be, so it was not tokenized

    call.serving.check_name(request.model)
    tokens_max = call.context.fleet.max_context_tokens - (request.max_output_tokens or 1)
    return replace(chat, messages=await fit(chat.messages, count, tokens_max=tokens_max))


async def fit(messages: Sequence[Json], count: Count, *, tokens_max: int) -> Sequence[Json]:
    """Returns the messages, without as many of the oldest turns as needed to have at most `tokens_max` tokens.

    System messages at the start and the last turn always remain. A turn begins with a message of the user, so no tool
    output loses its call.
    """
    if await count(messages) <= tokens_max:
        return messages
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns = [index for index, message in enumerate(messages) if index > first and message["role"] == "user"]
    if not turns:
        return messages
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        if await count([*messages[:first], *messages[turns[middle] :]]) <= tokens_max:
            high = middle
        else:
            low = middle + 1
    return [*messages[:first], *messages[turns[low] :]]
