"""Decides which web pages of other origins may call the HTTP server from a browser (CORS). Pure.

A browser asks first (preflight) and hides answers without these headers. Other programs are not bound by CORS, so it
protects people's browsers and never replaces keys.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from baton.core.errors import ConfigError
from baton.core.setting_names import flag, variable

_FIELD = "cors_origins"
_ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_HEADERS_CHARACTERS_MAX = 2048
_METHODS = "GET, HEAD, POST, DELETE"
_PREFLIGHT_S = 600
# Answers' headers that pages may read; browsers show only a few others.
_EXPOSED = "x-request-id, request-id, x-baton-warning, retry-after, retry-after-ms"

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class AllowedOrigins:
    """The origins whose pages may call the HTTP server.

    Attributes:
        origins: as browsers send them, such as `https://chat.example`; `*` alone: every origin.
    """

    origins: frozenset[str] = frozenset()

    @classmethod
    def read(cls, text: str, *, locked: bool) -> Self:
        """Reads the setting `cors_origins`.

        Args:
            locked: whether callers need a key or a token.

        Raises:
            ConfigError: an origin is malformed, or every page could use a gateway without keys.
        """
        origins = frozenset(part.strip().removesuffix("/") for part in text.split(",") if part.strip())
        if _ANY in origins:
            _check_any(origins, locked=locked)
            return cls(origins)
        for origin in sorted(origins):
            if not _ORIGIN.fullmatch(origin):
                message = f"{variable(_FIELD)} ({flag(_FIELD)}) has {origin!r}, which is not an origin"
                allowed = ("origins in lower case such as https://chat.example or http://localhost:5173", "*")
                raise ConfigError(message, field=_FIELD, value=origin, allowed=allowed, cure="leave out the path")
        return cls(origins)

    def allows(self, origin: str) -> bool:
        return bool(origin) and (origin in self.origins or _ANY in self.origins)

    def headers(self, origin: str) -> RawHeaders:
        """Returns the headers of an answer to a page of this origin; an empty origin is no page's.

        An answer without an allowed origin differs from others too, so caches must keep both apart.
        """
        if not self.origins:
            return []
        varying = [] if _ANY in self.origins else [(b"vary", b"origin")]
        if not self.allows(origin):
            return varying
        allowed: RawHeaders = [*varying, (b"access-control-expose-headers", _EXPOSED.encode())]
        if _ANY in self.origins:
            # NOTE: never with credentials: any page could use those that the browser has.
            return [*allowed, (b"access-control-allow-origin", b"*")]
        mine = (b"access-control-allow-origin", origin.encode("latin-1"))
        return [*allowed, mine, (b"access-control-allow-credentials", b"true")]

    def preflight(self, method: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """Returns the further headers of the answer if this is an allowed page's preflight, else None.

        Args:
            headers: headers of the request, with lower-case names.
        """
        asked = method == "OPTIONS" and "access-control-request-method" in headers
        if not asked or not self.allows(headers.get("origin", "")):
            return None
        answer = {"access-control-allow-methods": _METHODS, "access-control-max-age": str(_PREFLIGHT_S)}
        wanted = headers.get("access-control-request-headers", "").strip()
        if len(wanted) <= _HEADERS_CHARACTERS_MAX and _HEADER_NAMES.fullmatch(wanted):
            # The page itself is trusted, so it may send any header.
            answer["access-control-allow-headers"] = wanted
        return answer


def _check_any(origins: Iterable[str], *, locked: bool) -> None:
    if set(origins) != {_ANY}:
        message = f"{variable(_FIELD)} ({flag(_FIELD)}) has * next to origins"
        raise ConfigError(message, field=_FIELD, value=_ANY, cure="give * alone, or only origins")
    if not locked:
        message = (
            f"{variable(_FIELD)} ({flag(_FIELD)}) is *, and callers need no key: every web page could send requests"
        )
        cure = f"set {variable('api_keys')} ({flag('api_keys')}), or list the pages' origins"
        raise ConfigError(
            message, field=_FIELD, value=_ANY, allowed=("origins such as https://chat.example",), cure=cure
        )
