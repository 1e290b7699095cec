"""Answers GET /: a page about the gateway for browsers, and JSON for other clients."""

import json
from html import escape

import orjson
from starlette.responses import Response

from baton.core.version import __version__
from baton.gateway.http.call import HttpCall
from baton.gateway.http.docs.html import base_url, code, curl, document, link

_HTML = "text/html"


async def root(call: HttpCall) -> Response:
    if _HTML in call.request.headers.get("accept", ""):
        return _page(call)
    found = {"name": "baton", "gateway": call.context.view.name, "version": __version__, "docs": "/docs"}
    return Response(orjson.dumps(found), media_type="application/json", headers={"vary": "accept"})


def _page(call: HttpCall) -> Response:
    # Whoever has no key learns no name of a model.
    locked = call.context.settings.locked
    served = "" if locked else f" serves the model {code(call.serving.model.name)} and"
    ready = "can serve requests" if call.context.fleet.serves() and not call.context.draining else "is not ready"
    body = json.dumps({"messages": [{"role": "user", "content": "What does zip do?"}], "max_tokens": 32})
    url = base_url(call)
    return document(
        "Baton",
        f"""<h1>Baton</h1>
<p>The gateway {code(call.context.view.name)} (version {escape(__version__)}){served} {ready}.</p>
<ul>
<li>{link("/ui", "/ui")}: the cluster, its requests, and a place to try a prompt</li>
<li>{link("/docs", "/docs")}: every endpoint and every parameter</li>
<li>{link("/health", "/health")} and {link("/ready", "/ready")}: for probes</li>
</ul>
<h2>Send a request</h2>
{curl(f"{url}/v1/chat/completions", body, locked=locked)}
<p>Clients of OpenAI's API take the base URL {code(f"{url}/v1")}, clients of Anthropic's {code(url)}.</p>""",
        vary="accept",
    )
