"""The handlers that generate nothing: models, tokenization, health, version and metrics."""

from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.responses import Response

from baton.core.errors import Draining
from baton.core.types import AdapterRef
from baton.core.version import __version__
from baton.gateway.fleet.revisions import serving_revisions
from baton.gateway.http.bodies import DetokenizeBody, TokenizeBody
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import checked
from baton.gateway.http.counting import encode_chat
from baton.gateway.http.custom_tools import with_functions
from baton.gateway.request.node_choice import no_node
from baton.gateway.text.chat.json_request import chat_request
from baton.gateway.text.chat.types import ChatRequest
from baton.metrics.exposition import CONTENT_TYPE
from baton.metrics.page import names_of


async def models(call: HttpCall) -> Response:
    """Lists the models, with the fields of both OpenAI's and Anthropic's lists."""
    adapters = call.context.fleet.adapters()
    cards = [_card(call), *(_card(call, adapters[name]) for name in sorted(adapters))]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return _json({"object": "list", "data": cards, "has_more": False, **ends})


async def model(call: HttpCall) -> Response:
    return _json(_card(call, call.serving.check_name(call.request.path_params["model"])))


async def tokenize(call: HttpCall) -> Response:
    body, chat = await call.read_as(_understand_tokenize)
    call.field_names = {"text": "prompt"}
    serving = call.serving
    serving.check_name(body.model)
    if chat is not None:
        token_ids = await encode_chat(serving, chat, is_request=True)
    else:
        text = body.prompt or ""
        token_ids = await serving.encode(text, add_special_tokens=body.add_special_tokens, is_request=True)
    tokenizer = serving.model.tokenizer
    return _json(
        {
            "count": len(token_ids),
            "max_model_len": call.context.fleet.max_context_tokens,
            "tokens": token_ids,
            "token_strs": [tokenizer.token_text(token) for token in token_ids] if body.return_token_strs else None,
        }
    )


def _understand_tokenize(value: dict[str, Any]) -> tuple[TokenizeBody, ChatRequest | None]:
    body = checked(TokenizeBody, value)
    return body, None if body.messages is None else chat_request(with_functions(dict(body)))


async def detokenize(call: HttpCall) -> Response:
    body = await call.read(DetokenizeBody)
    serving = call.serving
    serving.check_name(body.model)
    serving.model.check_token_ids("tokens", body.tokens)
    return _json({"prompt": await serving.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)})


async def health(_: HttpCall) -> Response:
    """Answers as long as the process lives."""
    return _json({"status": "ok"})


async def ready(call: HttpCall) -> Response:
    """Answers whether new requests can be served."""
    if call.context.draining:
        raise Draining("the gateway is draining")
    if not call.context.fleet.serves():
        raise no_node(call.context.fleet)
    return _json({"status": "ready"})


async def version(_: HttpCall) -> Response:
    return _json({"version": __version__})


async def metrics(call: HttpCall) -> Response:
    """Answers with the metrics, for Prometheus."""
    names = names_of(call.request.url.query)
    return Response(await call.serving.metrics.page(names), media_type=CONTENT_TYPE)


def _card(call: HttpCall, adapter: AdapterRef | None = None) -> dict[str, Any]:
    """Returns the card of the served model, or of one of its adapters."""
    served, fleet = call.serving.model, call.context.fleet
    revisions = serving_revisions(fleet.nodes())
    if adapter is not None:
        return _card(call) | {
            "id": adapter.name,
            "display_name": adapter.name,
            "root": adapter.name,
            "parent": served.name,
            "revision": adapter.revision,
            "revisions": [{"revision": adapter.revision, "name": ""}],
        }
    return {
        "id": served.name,
        "object": "model",
        "type": "model",
        "display_name": served.name,
        "created": call.context.started_s,
        "created_at": datetime.fromtimestamp(call.context.started_s, UTC).isoformat(),
        "owned_by": "baton",
        **({"description": served.description} if served.description else {}),
        "root": served.name,
        "parent": None,
        "max_model_len": fleet.max_context_tokens,
        "max_input_tokens": fleet.max_context_tokens,
        "revision": revisions[0].revision if len(revisions) == 1 else None,
        "revisions": [{"revision": each.revision, "name": each.name} for each in revisions],
    }


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")
