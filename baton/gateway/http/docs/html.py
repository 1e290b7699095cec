"""Writes HTML documents whose only style is their own, and which run no script. Everything from outside is escaped."""

import base64
import hashlib
from html import escape

from starlette.responses import Response

from baton.gateway.http.call import HttpCall

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 62rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 2.5rem; padding-top: 1rem; border-top: 1px solid #8885; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; overflow-wrap: anywhere; }
pre { padding: 0.8rem; background: #8882; border-radius: 6px; white-space: pre-wrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 0.3rem 0.8rem 0.3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8885; }
:target { background: #8882; outline: 2px solid currentColor; }
tbody th { font-weight: normal; }
th code { overflow-wrap: normal; }
.need { font-weight: 600; }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_DIGEST}'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def document(title: str, body: str, **headers: str) -> Response:
    """Returns a page.

    Args:
        body: HTML, in which everything from outside is escaped.
    """
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="/ui/icon.svg">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )
    return Response(page, media_type="text/html; charset=utf-8", headers={**_HEADERS, **headers})


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def link(href: str, text: str) -> str:
    return f'<a href="{escape(href)}">{escape(text)}</a>'


def curl(url: str, body: str, *, locked: bool) -> str:
    """Returns a command that posts this JSON.

    Args:
        locked: whether the gateway requires a key.
    """
    lines = [f"curl {url}", "--header 'content-type: application/json'"]
    if locked:
        lines.append('--header "authorization: Bearer $BATON_API_KEY"')
    lines.append(f"--data '{body}'")
    command = " \\\n  ".join(lines)
    return f"<pre>{escape(command)}</pre>"


def base_url(call: HttpCall) -> str:
    """The URL under which the client reaches this gateway."""
    return f"{call.request.url.scheme}://{call.request.headers.get('host') or 'localhost'}"
