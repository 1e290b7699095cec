"""The table of HTTP paths and their handlers."""

from dataclasses import dataclass

from pydantic import BaseModel

from baton.gateway.http import openai, server_info
from baton.gateway.http.anthropic import routes as anthropic
from baton.gateway.http.anthropic.errors import anthropic_error
from baton.gateway.http.anthropic.models import CountTokensRequest, MessagesRequest
from baton.gateway.http.app import App, Handler
from baton.gateway.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from baton.gateway.http.call import Context
from baton.gateway.http.docs.reference import docs
from baton.gateway.http.docs.welcome import root
from baton.gateway.http.embeddings import EmbeddingsBody, embeddings
from baton.gateway.http.rerank import RerankBody, ScoreBody, rerank, score
from baton.gateway.http.responses import routes as stored
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.ui import files
from baton.gateway.http.ui.state import state


@dataclass(frozen=True)
class HttpRoute:
    """A path and its handler. A route with a body is a POST; any other is a GET, unless `verb` says otherwise. `listed`
    routes appear in /docs."""

    path: str
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None
    listed: bool = True
    verb: str = "GET"

    @property
    def method(self) -> str:
        return self.verb if self.body is None else "POST"


ROUTES = (
    HttpRoute("/v1/chat/completions", openai.chat_completions, "Continue a conversation", ChatBody),
    HttpRoute("/v1/completions", openai.completions, "Continue a text", CompletionBody),
    HttpRoute("/v1/responses", stored.responses, "Continue a conversation, as OpenAI's Responses", ResponsesRequest),
    HttpRoute("/v1/responses/input_tokens", stored.count, "Tokens of a conversation, as Responses", ResponsesRequest),
    HttpRoute("/v1/responses/{response_id}", stored.stored_response, "A stored response"),
    HttpRoute("/v1/responses/{response_id}", stored.delete, "Delete a stored response", verb="DELETE"),
    HttpRoute("/v1/responses/{response_id}/cancel", stored.cancel, "End a response in progress", verb="POST"),
    HttpRoute("/v1/responses/{response_id}/input_items", stored.input_items, "The items that led to a stored response"),
    HttpRoute("/v1/messages", anthropic.messages, "Continue a conversation, as Anthropic's", MessagesRequest),
    HttpRoute(
        "/v1/messages/count_tokens", anthropic.count, "Tokens of a conversation, as Anthropic's", CountTokensRequest
    ),
    HttpRoute("/v1/embeddings", embeddings, "Vectors of texts", EmbeddingsBody),
    HttpRoute("/v1/rerank", rerank, "Documents by their relevance to a query", RerankBody),
    HttpRoute("/rerank", rerank, "Documents by their relevance to a query", RerankBody, listed=False),
    HttpRoute("/v1/score", score, "Scores of pairs of texts", ScoreBody),
    HttpRoute("/v1/models", server_info.models, "The served model, as a list"),
    HttpRoute("/v1/models/{model:path}", server_info.model, "The served model"),
    HttpRoute("/tokenize", server_info.tokenize, "Token ids of a text or a conversation", TokenizeBody),
    HttpRoute("/detokenize", server_info.detokenize, "The text of token ids", DetokenizeBody),
    HttpRoute("/", root, "About this gateway: name and version; a page for browsers"),
    HttpRoute("/docs", docs, "This API, for people", listed=False),
    HttpRoute("/health", server_info.health, "200 as long as the process lives"),
    HttpRoute("/ready", server_info.ready, "200 if a new request can be served, else 503 with the reason"),
    HttpRoute("/version", server_info.version, "Baton's version"),
    HttpRoute("/metrics", server_info.metrics, "Metrics in Prometheus' text format"),
    HttpRoute("/ui", files.page, "The cluster in a browser", listed=False),
    HttpRoute("/ui/state", state, "What /ui shows"),
    *(HttpRoute(f"/ui/{name}", files.file, "A file of /ui", listed=False) for name in sorted(files.FILES)),
)


def create_app(context: Context) -> App:
    """Creates the application with all routes."""
    app = App(context)
    for route in ROUTES:
        app.add(
            route.path, route.handler, method=route.method, body=route.body, summary=route.summary, listed=route.listed
        )
    context.error_shapes["/v1/messages"] = anthropic_error
    return app
