"""Code shared by embeddings, rerank and score: fields of their bodies, the call, usage and receipts of an answer."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field
from starlette.responses import Response

from baton.gateway.http.bodies import Text
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import Model
from baton.gateway.http.client_fields import IGNORED
from baton.gateway.http.event_stream import unless_left
from baton.gateway.observe.meter import EMBEDDINGS
from baton.gateway.serving.pooling import PooledAnswer, PoolingRequest
from baton.protos.internal.v1 import prefill_pb2 as pb

T = TypeVar("T")


class PoolingOptions(Model):
    """Baton's own options of requests that generate nothing."""

    receipt: bool = Field(False, description="add a receipt for each batch, as the header x-baton-receipt does")


class PoolingBody(Model):
    """Fields of all requests for pooled prompts."""

    model: str = Field("", description="default: the served model")
    user: str | None = Field(None, description=IGNORED)
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = Field(
        0, description="waiting requests with lower values go first"
    )
    cache_salt: Text | None = Field(None, description="requests share cached prefixes only with the same salt")
    truncate_prompt_tokens: int | None = Field(
        None,
        description="cut texts at their end if a prompt has more tokens; -1: more than the model takes",
    )
    baton: PoolingOptions = Field(PoolingOptions(), description="options of this server only")


async def pooled(
    call: HttpCall, body: PoolingBody, size_bytes: int, tokenize: Callable[[], Sequence[pb.PoolPrompt]]
) -> PooledAnswer:
    """Serves the request; cancels it if the client leaves.

    Raises:
        BatonError: the request failed.
        ClientLeft: the client closed its connection.
    """
    request = PoolingRequest(
        request_id=call.request_id,
        answer_id=call.answer_id,
        model=body.model,
        operation=EMBEDDINGS,
        size_bytes=size_bytes,
        tokenize=tokenize,
        cache_salt=body.cache_salt or "",
        priority=body.priority,
    )
    answers: list[PooledAnswer] = []

    async def serve() -> None:
        answers.append(await call.serving.pool(request, budget_s=call.budget_s, caller_trace=call.caller_trace()))

    await unless_left(asyncio.create_task(serve()), call.request.receive)
    return answers[0]


def add_report(call: HttpCall, body: PoolingBody, answer: PooledAnswer, given: dict[str, Any]) -> dict[str, Any]:
    """Adds the usage, and the receipts if the client wants them."""
    given["usage"] = {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
    if call.wants_receipt or body.baton.receipt:
        receipts = [receipt.json() for receipt in answer.receipts]
        given["baton"] = {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
    return given


async def json_answer(make: Callable[[], dict[str, Any]]) -> Response:
    """Writes an answer in a thread, because that of many long vectors takes longer than a step of the event loop."""
    content = await asyncio.to_thread(partial(_dump, make))
    return Response(content, media_type="application/json")


def _dump(make: Callable[[], dict[str, Any]]) -> bytes:
    return orjson.dumps(make(), option=orjson.OPT_SERIALIZE_NUMPY)
