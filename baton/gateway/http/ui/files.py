"""Serves the files of the page. They contain no data, so anyone may read them. The policy allows no other scripts."""

from importlib import resources

from starlette.responses import Response

from baton.gateway.http.call import HttpCall
from baton.security.authorize import UI_FILES

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}

FILES = frozenset(path.removeprefix("/ui/") for path in UI_FILES)


async def page(_: HttpCall) -> Response:
    return _file("page.html")


async def file(call: HttpCall) -> Response:
    return _file(call.request.url.path.removeprefix("/ui/"))


def _file(name: str) -> Response:
    """Returns a file of this package. The route table provides its name, so a client cannot choose another file."""
    body = (resources.files("baton.gateway.http.ui") / name).read_bytes()
    return Response(body, media_type=_TYPES[name.rpartition(".")[2]], headers=HEADERS)
