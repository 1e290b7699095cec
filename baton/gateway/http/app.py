"""The ASGI application: routes, the page /docs that describes them, authentication, and one answer for every error."""

import ipaddress
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from baton.core.errors import BatonError, InternalError, InvalidRequest
from baton.core.log_lines import printable
from baton.core.version import __version__
from baton.gateway.http.call import REQUEST_ID, Context, HttpCall
from baton.gateway.http.cors import AllowedOrigins
from baton.gateway.http.errors import HttpRefusal, error_response
from baton.gateway.http.event_stream import RAW_SEND, ClientLeft, log_answer
from baton.gateway.http.head import JSON_TYPE, unsupported
from baton.security.authenticator import bearer
from baton.security.authorize import Right, check, rights_for_path
from baton.security.identity import NOBODY, enter

_CURE = "set API keys (BATON_API_KEYS), or make the proxy send the address that it connects to as the host"
_REQUEST_ID_CHARACTERS_MAX = 256
_WARNING_CHARACTERS_MAX = 300
_SCHEMAS = "#/components/schemas/{model}"
# OpenAI's paths that would match the path of a stored response, and what clients do without them.
_NOT_SERVED = {
    "/v1/responses/compact": "ask for a summary by /v1/responses, as Codex does if its provider's name is not OpenAI"
}

log = logging.getLogger("baton")

Handler = Callable[[HttpCall], Awaitable[Response]]


class App:
    """The ASGI application. Assigns request ids, checks callers, and answers errors."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._origins = AllowedOrigins.read(context.settings.cors_origins, locked=context.settings.locked)
        self.api = FastAPI(title="Baton", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
        self.api.openapi = self._openapi  # type: ignore[method-assign]
        self._page: dict[str, Any] | None = None
        self._bodies: dict[str, type[BaseModel]] = {}
        self.api.add_exception_handler(BatonError, self._answer_error)
        self.api.add_exception_handler(HTTPException, self._answer_http_error)

    def add(
        self,
        path: str,
        handler: Handler,
        *,
        method: str = "POST",
        body: type[BaseModel] | None = None,
        summary: str,
        listed: bool = True,
    ) -> None:
        """Adds a route.

        Args:
            handler: answers a call; an error that it raises becomes the answer.
            body: model of the request's body, for /docs only; the handler itself reads the body.
            listed: show the route in /docs.
        """

        async def endpoint(request: Request) -> Response:
            call = HttpCall(self.context, request)
            try:
                response = await handler(call)
            except BatonError as error:
                raise call.in_own_words(error) from None
            except ClientLeft:
                raise
            except Exception as error:  # noqa: BLE001  the framework would answer in its own shape
                return self._error(request.scope, error)
            response.headers["x-request-id"] = call.request_id
            for text in call.warnings:
                response.headers.append(
                    "x-baton-warning", printable(text, _WARNING_CHARACTERS_MAX).encode("ascii", "replace").decode()
                )
            return response

        extra: dict[str, Any] = {}
        if names := re.findall(r"{(\w+)", path):
            extra["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if body is not None:
            extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": self._refer(body)}}}
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        for each in methods:
            self.api.add_api_route(
                path, endpoint, methods=[each], summary=summary, openapi_extra=extra, response_model=None,
                include_in_schema=listed and each != "HEAD", operation_id=f"{each.lower()}{path.replace('/', '_')}",
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        scope[REQUEST_ID] = given = headers.get("x-request-id", "")
        if not _is_request_id(given):
            scope[REQUEST_ID] = uuid.uuid4().hex
        scope[RAW_SEND] = send
        started = False

        cors = self._origins.headers(headers.get("origin", ""))

        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                closing = [(b"connection", b"close")] if self.context.draining else []
                message["headers"] = [*message["headers"], *cors, *closing]
            await send(message)

        async def noting_start(message: Message) -> None:
            nonlocal started
            started = True
            await start(message)

        try:
            if given and scope[REQUEST_ID] != given:
                allowed = (f"1 to {_REQUEST_ID_CHARACTERS_MAX} visible ASCII characters",)
                raise InvalidRequest("x-request-id is not a request id", field="x-request-id", allowed=allowed)
            self._refuse_pages(scope["method"], headers)
            # A browser sends a preflight without credentials, so it is answered before they are checked.
            if (preflight := self._origins.preflight(scope["method"], headers)) is not None:
                await Response(status_code=204, headers=preflight)(scope, receive, noting_start)
                return
            self._admit(scope, headers)
            await self.api(scope, receive, noting_start)
        except ClientLeft:
            log.debug("%s: the client disconnected", scope[REQUEST_ID])
        except Exception as error:
            if started:
                raise
            await self._error(scope, error)(scope, receive, start)
        finally:
            # `send` refers to the server's request, which refers to the scope: a cycle for the garbage collector.
            del scope[RAW_SEND]

    def _refuse_pages(self, method: str, headers: Headers) -> None:
        """Refuses pages that may not use a gateway without keys. Raises what `check_not_a_page` raises."""
        authenticator = self.context.authenticator
        if authenticator is not None and not authenticator.locked:
            check_not_a_page(method, headers, listen_host=self.context.listen_host)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Identifies the caller, and checks its rights for the path.

        Raises:
            Unauthenticated, PermissionDenied: the caller may not use this path.
        """
        authenticator, needed = self.context.authenticator, rights_for_path(scope["path"])
        if authenticator is None:
            return
        if Right.ANYONE in needed:
            enter(NOBODY)
            return
        # Anthropic's clients send x-api-key.
        credential = bearer(headers.get("authorization")) or headers.get("x-api-key")
        caller = authenticator.caller(credential, (scope.get("client") or ("unix", 0))[0])
        check(scope["path"], needed, caller.rights)
        enter(caller)

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        return self._error(request.scope, error)

    async def _answer_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method, path = request.method, request.url.path
        if error.status_code == 405 and path not in _NOT_SERVED:
            message = f"{path} does not have the method {method}"
            methods = set(Headers(error.headers).get("allow", "").split(", "))
            allowed = tuple(sorted(methods | {"HEAD"} if "GET" in methods else methods))
            headers = {"allow": ", ".join(allowed)}
            refused = HttpRefusal(405, "method_not_allowed", message, allowed=allowed, headers=headers)
            return self._error(request.scope, refused)
        message = f"{method} {path} does not exist"
        cure = _NOT_SERVED.get(path) or cure_of_path(path, self._exists)
        status = 404 if error.status_code == 405 else error.status_code
        return self._error(request.scope, HttpRefusal(status, "not_found", message, cure=cure))

    def _error(self, scope: Scope, error: Exception) -> Response:
        request_id = scope[REQUEST_ID]
        if not isinstance(error, BatonError):
            log.error("request %s failed", request_id, exc_info=error)
            error = InternalError(f"{type(error).__name__} in the gateway", cure="see the gateway's log")
        # Errors with a request id were counted by `serving`, and a probe that must wait is not an error.
        if not error.request_id and scope["path"] != "/ready":
            self.context.serving.meter.refused_at_door(error)
        log_answer(request_id, error)
        return error_response(error, request_id, self.context.error_shape(scope["path"]))

    def _exists(self, path: str) -> bool:
        return any(route.path_regex.match(path) for route in self.api.routes if isinstance(route, Route))

    def _openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI schema, with the bodies that handlers read themselves."""
        if self._page is None:
            page = get_openapi(title=self.api.title, version=self.api.version, routes=self.api.routes)
            _, schemas = models_json_schema(
                [(body, "validation") for body in self._bodies.values()], ref_template=_SCHEMAS
            )
            page.setdefault("components", {}).setdefault("schemas", {}).update(schemas.get("$defs", {}))
            self._page = page
        return self._page

    def _refer(self, body: type[BaseModel]) -> dict[str, str]:
        self._bodies[body.__name__] = body
        return {"$ref": _SCHEMAS.format(model=body.__name__)}


def _is_request_id(text: str) -> bool:
    return 0 < len(text) <= _REQUEST_ID_CHARACTERS_MAX and text.isascii() and text.isprintable() and " " not in text


def cure_of_path(path: str, exists: Callable[[str], bool]) -> str:
    """Returns what is probably wrong with a path that does not exist: most often, the client's base URL."""
    meant = {
        f"/v1{path}": "give the client a base URL that ends in /v1",
        path.removeprefix("/v1"): "give the client a base URL without /v1",
        path.rstrip("/"): "leave out the slash at the end",
        re.sub("/{2,}", "/", path): "give the client a base URL without a slash at the end",
    }
    return next((cure for name, cure in meant.items() if name != "/" and exists(name)), "see /docs")


def check_not_a_page(method: str, headers: Mapping[str, str], *, listen_host: str | None) -> None:
    """Refuses requests of web pages to a gateway without keys, which any page in a browser on this machine can reach.

    Without a preflight, a page can send only a few content types, never application/json. A page whose name was made
    to resolve to this machine (DNS rebinding) sends its own name as the host. So neither check needs a rule about
    origins. `cors_origins` lists the origins whose preflights are answered and whose pages may read answers; pages of
    other origins cannot read them. A listed page calls the gateway by the gateway's own name, so it passes both checks.

    Args:
        headers: headers with lower-case names.
        listen_host: host that the gateway listens on, if only this machine reaches it; None: other machines reach it,
            by unknown names.

    Raises:
        HttpRefusal: 403 for a foreign host name, or 415 for a body without a content type.
    """
    if listen_host is not None and not _is_own(headers.get("host", ""), listen_host):
        message = f"this gateway is not {headers.get('host', '')!r}"
        allowed = ("localhost", "an IP address")
        raise HttpRefusal(403, "foreign_host", message, field="host", allowed=allowed, cure=_CURE)
    if method == "POST" and "content-type" not in headers:
        raise unsupported("the body has no type", JSON_TYPE, f"send the header content-type: {JSON_TYPE}")


def _is_own(host: str, listen_host: str) -> bool:
    """Whether a browser sends this host only for pages that this machine or a bare IP address served."""
    if not host:  # not from a browser
        return True
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if name in ("localhost", listen_host.lower()) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
