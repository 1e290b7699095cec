"""The handlers of `/v1/responses` and of the responses that are stored."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from pydantic import TypeAdapter
from starlette.responses import Response

from baton.core.errors import ContextOverflow, InvalidRequest
from baton.gateway.core.json_reader import TooManyValues, parse_json
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import checked
from baton.gateway.http.chunks import receipt_json
from baton.gateway.http.counting import encode_chat
from baton.gateway.http.event_stream import HttpJob
from baton.gateway.http.field_errors import short
from baton.gateway.http.head import check_content
from baton.gateway.http.logprobs import LogprobWriter
from baton.gateway.http.responses.answer import Identity, ResponseObject, response_id
from baton.gateway.http.responses.items import Item, ItemReference
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.responses.store import StoredResponse
from baton.gateway.http.responses.stored import encoded, items_of, response_of_item
from baton.gateway.http.responses.stream import ResponsesStream
from baton.gateway.http.responses.translate import Conversation, to_conversation, to_message, wants_logprobs
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
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_PAGE_MAX = 100
_PREVIOUS = "previous_response_id"
_TOO_LARGE = "store: the conversation is larger than the memory for stored responses (--response-store-mib)"
_BEGIN_ANEW = "begin a new conversation with what is needed of this one"


@dataclass(frozen=True)
class _Understood:
    """A checked request.

    Attributes:
        inputs: its items as the client sent them, as JSON without brackets, if the response is to be stored.
        conversation: None: it refers to stored items, which must be found first.
    """

    request: ResponsesRequest
    message: pb.GenerateRequest
    inputs: bytes
    conversation: Conversation | None


async def responses(call: HttpCall) -> Response:
    call.field_names = _FIELD_NAMES
    stored = call.context.stored
    understood = await call.read_as(partial(_understand, store_is_on=stored.is_on))
    request, message, inputs = understood.request, understood.message, understood.inputs
    if request.store:
        stored.check_on("store")
    message.request_id = call.request_id
    previous, conversation = None, understood.conversation
    if conversation is None:
        previous, inputs, conversation = await _continued(call, request, inputs)
    for warning in conversation.warnings:
        call.warn(warning)
    if (raw_tool := conversation.raw_tool) is not None:
        call.field_names = {**_FIELD_NAMES, "grammar": f"{raw_tool.where}.format.definition"}
    elif conversation.chat.grammar is None:
        call.field_names = {**_FIELD_NAMES, "grammar": "tools"}
    chat = conversation.chat
    if request.truncation == "auto":
        chat = await _fitting(call, request, chat)
    keeps = stored.is_on and request.store is not False
    if keeps and not stored.has_room_for(inputs, previous):
        call.warn(_TOO_LARGE)
        keeps = False
    call.new_answer_id(response_id(""), resumable=bool(request.return_token_ids))
    response = ResponseObject(request, _identity(call, request), conversation, stored=keeps)

    def keep(body: bytes) -> None:
        outputs = orjson.loads(body)["output"]
        stored.keep(StoredResponse(response.identity.key, body, inputs, encoded(outputs), previous))

    if request.stream:
        encoder = ResponsesStream(response, token_ids=bool(request.return_token_ids), keep=keep if keeps else None)
        # As in OpenAI's API, where Codex finds out by this event alone that it must shorten the conversation.
        return call.stream(message, encoder, chat, as_events=ContextOverflow)
    answer = response.answer()
    await call.serve([HttpJob(message, answer.collect, chat, answer.collect)])
    body = response.ended(answer)
    if keeps:
        keep(body)
    return _json(body)


async def count(call: HttpCall) -> Response:
    """Counts the tokens of a request's prompt."""
    call.field_names = _FIELD_NAMES
    understood = await call.read_as(partial(_understand, store_is_on=False))
    request, conversation = understood.request, understood.conversation
    if conversation is None:
        _, _, conversation = await _continued(call, request, b"")
    for warning in conversation.warnings:
        call.warn(warning)
    call.serving.check_name(request.model)
    tokens = len(await encode_chat(call.serving, conversation.chat, is_request=True))
    return _json(orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens}))


async def stored_response(call: HttpCall) -> Response:
    """Answers with a stored response."""
    if call.request.query_params.get("stream", "false") == "true":
        cure = "leave it out: only an answer that runs in the background could be streamed later"
        raise InvalidRequest("stream is true", field="stream", value="true", allowed=("false",), cure=cure)
    found = await call.context.stored.existing(_given(call))
    return _json(found.body)


async def delete(call: HttpCall) -> Response:
    """Forgets a stored response."""
    await call.context.stored.delete(_given(call))
    return _json(orjson.dumps({"id": _given(call), "object": "response", "deleted": True}))


async def cancel(call: HttpCall) -> Response:
    """Ends a response that another connection is waiting for, whose stream then ends with `response.failed`."""
    check_content(call.request.headers)
    given = _given(call)
    if given.startswith(response_id("")) and await call.serving.abort([given]):
        return _json(orjson.dumps({"id": given, "object": "response", "status": "cancelled", "output": []}))
    await call.context.stored.existing(given)
    message = f"{given} has ended"
    raise InvalidRequest(message, field="response_id", value=given, allowed=("a response in progress",))


async def input_items(call: HttpCall) -> Response:
    """Lists the items that led to a stored response, a page at a time."""
    limit, order = _page(call)
    after = call.request.query_params.get("after", "")
    found = await call.context.stored.existing(_given(call))
    items = await call.serving.texts.run(found.items_bytes, partial(items_of, found, before_answer=True))
    if order == "desc":
        items.reverse()
    ids = [str(item["id"]) for item in items]
    if after and after not in ids:
        raise InvalidRequest("after names no item", field="after", value=short(after), cure="give the id of an item")
    begin = ids.index(after) + 1 if after else 0
    page = [_listed(item) for item in items[begin : begin + limit]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    has_more = begin + limit < len(items)
    return _json(orjson.dumps({"object": "list", "data": page, **ends, "has_more": has_more}))


def _understand(body: dict[str, Any], *, store_is_on: bool) -> _Understood:
    request = checked(ResponsesRequest, body)
    items = [] if isinstance(request.input, str) else request.input
    refers = request.previous_response_id is not None or any(isinstance(item, ItemReference) for item in items)
    given = body["input"]
    inputs = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    kept = encoded(inputs) if store_is_on and request.store is not False else b""
    return _Understood(request, to_message(request), kept, None if refers else to_conversation(request))


async def _continued(
    call: HttpCall, request: ResponsesRequest, inputs: bytes
) -> tuple[StoredResponse | None, bytes, Conversation]:
    """Finds the stored items that a request refers to.

    Returns:
        The response that the request continues, the request's own items without references, and the conversation.
    """
    stored = call.context.stored
    previous = None
    if request.previous_response_id is not None:
        previous = await stored.previous(request.previous_response_id)
    named = [item.id for item in request.input if isinstance(item, ItemReference)]
    sources: dict[str, StoredResponse] = {}
    if named:
        stored.check_on("input")
    for source in dict.fromkeys(filter(None, map(response_of_item, named))):
        if (found := await stored.find(source)) is not None:
            sources[source] = found
    size_bytes = sum(each.items_bytes for each in (previous, *sources.values()) if each is not None)
    bytes_max = int(call.context.settings.http_body_mib * (1 << 20))
    if size_bytes > bytes_max:
        raise InvalidRequest(
            f"the stored items have {size_bytes} bytes",
            field=_PREVIOUS,
            value=size_bytes,
            allowed=(f"up to {bytes_max} bytes",),
            cure=_BEGIN_ANEW,
        )
    work = partial(_with_stored, request, previous, list(sources.values()), inputs)
    return previous, *await call.serving.texts.run(size_bytes, work)


def _with_stored(
    request: ResponsesRequest,
    previous: StoredResponse | None,
    sources: Sequence[StoredResponse],
    inputs: bytes,
) -> tuple[bytes, Conversation]:
    """Returns the request's own items without references, and the conversation. Runs in a thread."""
    by_id = {str(item["id"]): item for source in sources for item in items_of(source)}
    items = [] if previous is None else items_of(previous)
    try:
        parse_json(orjson.dumps(items))
    except TooManyValues as error:
        message = f"the stored items have {error}"
        raise InvalidRequest(message, field=_PREVIOUS, allowed=(error.allowed,), cure=_BEGIN_ANEW) from None
    own = request.input if not isinstance(request.input, str) else []
    named = {item.id for item in own if isinstance(item, ItemReference)} & by_id.keys()
    referenced = dict(zip(named, _ITEMS.validate_python([by_id[name] for name in named]), strict=True))
    conversation = to_conversation(request, _ITEMS.validate_python(items), referenced)
    return _resolved(inputs, by_id) if referenced else inputs, conversation


def _resolved(inputs: bytes, by_id: Mapping[str, dict[str, Any]]) -> bytes:
    """Replaces references, so that what is stored refers to nothing that may be deleted."""
    items = orjson.loads(b"[%b]" % inputs)
    return encoded([by_id[item["id"]] if item.get("type") == "item_reference" else item for item in items])


def _given(call: HttpCall) -> str:
    return str(call.request.path_params["response_id"])


def _page(call: HttpCall) -> tuple[int, str]:
    """Returns the number of items of a page and their order."""
    given = call.request.query_params
    limit, order = given.get("limit", "20"), given.get("order", "desc")
    if not (
        limit.isascii() and limit.isdecimal() and len(limit) <= len(str(_PAGE_MAX)) and 1 <= int(limit) <= _PAGE_MAX
    ):
        raise InvalidRequest(f"limit is {short(limit)}", field="limit", value=limit, allowed=(f"1 to {_PAGE_MAX}",))
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {short(order)}", field="order", value=order, allowed=("asc", "desc"))
    return int(limit), order


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item as a list shows it: with its type, and a message's text as a part."""
    if item.get("type", "message") != "message" or not isinstance(item["content"], str):
        return {"type": "message", **item}
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    part = {"type": kind, "text": item["content"], **({"annotations": []} if kind == "output_text" else {})}
    return {**item, "type": "message", "status": "completed", "content": [part]}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _identity(call: HttpCall, request: ResponsesRequest) -> Identity:
    def write_logprobs(tokens: Sequence[common_pb2.Token]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = writer.chat(tokens)["content"]
        return content

    writer = LogprobWriter(call.serving.model.tokenizer, as_ids=False)
    return Identity(
        key=call.answer_id.removeprefix(response_id("")),
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
