"""Which path has which handler."""

from gateway.http import about, openai
from gateway.http.anthropic import routes as anthropic
from gateway.http.anthropic.errors import anthropic_error
from gateway.http.anthropic.models import CountTokensRequest, MessagesRequest
from gateway.http.app import App
from gateway.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.http.call import Context
from gateway.http.responses.models import ResponsesRequest
from gateway.http.responses.routes import responses


def create_app(context: Context) -> App:
    """The application with all routes."""
    app = App(context)
    app.add("/v1/chat/completions", openai.chat_completions, body=ChatBody, summary="Continue a conversation")
    app.add("/v1/completions", openai.completions, body=CompletionBody, summary="Continue a text")
    app.add("/v1/responses", responses, body=ResponsesRequest, summary="Continue a conversation, as OpenAI's Responses")
    app.add("/v1/messages", anthropic.messages, body=MessagesRequest, summary="Continue a conversation, as Anthropic's")
    counted = "Tokens of a conversation, as Anthropic's"
    app.add("/v1/messages/count_tokens", anthropic.count, body=CountTokensRequest, summary=counted)
    context.error_shapes["/v1/messages"] = anthropic_error
    app.add("/v1/models", about.models, method="GET", summary="The served model, as a list")
    app.add("/v1/models/{model:path}", about.model, method="GET", summary="The served model")
    app.add("/tokenize", about.tokenize, body=TokenizeBody, summary="Token ids of a text or a conversation")
    app.add("/detokenize", about.detokenize, body=DetokenizeBody, summary="The text of token ids")
    app.add("/", about.root, method="GET", summary="What answers here")
    app.add("/health", about.health, method="GET", summary="200 as long as the process lives")
    app.add("/ready", about.ready, method="GET", summary="200 if a request can be served, else 503")
    app.add("/version", about.version, method="GET", summary="Baton's version")
    app.add("/metrics", about.metrics, method="GET", summary="Counters in Prometheus' text format")
    return app
