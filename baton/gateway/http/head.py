"""Checks a request's first line and headers by RFC 9110 and RFC 9112, where the parser does not. Pure."""

import re
from collections.abc import Iterable, Mapping

from baton.gateway.http.errors import HttpRefusal

_VERSIONS = ("1.0", "1.1")
_HOST = re.compile(rb"(\[[0-9A-Fa-fVv:._~!$&'()*+,;=-]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?", re.ASCII)
JSON_TYPE = "application/json"
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


def check_head(method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Checks a request's first line and headers.

    Args:
        headers: headers with lower-case names.

    Raises:
        HttpRefusal: 400 for a missing, repeated or malformed host; 501 for an unknown method or transfer coding; 505
            for another version of HTTP.
    """
    if version not in _VERSIONS:
        raise HttpRefusal(505, "http_version_not_supported", f"the request uses HTTP {version}", allowed=_VERSIONS)
    if method == b"CONNECT":
        raise HttpRefusal(501, "not_implemented", "CONNECT is not supported, because this server is not a proxy")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        cure = "send one host header"
        raise HttpRefusal(400, "invalid_http", f"the request has {len(hosts)} host headers", field="host", cure=cure)
    if hosts and not _HOST.fullmatch(hosts[0].strip()):
        allowed = ("host", "host:port")
        raise HttpRefusal(400, "invalid_http", f"host is {hosts[0].decode('latin-1')!a}", field="host", allowed=allowed)
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and b",".join(codings).strip().lower() != b"chunked":
        message = f"the body's transfer-encoding is {codings[0].decode('latin-1')!a}"
        raise HttpRefusal(501, "not_implemented", message, field="transfer-encoding", allowed=("chunked",))


def check_content(headers: Mapping[str, str]) -> None:
    """Checks that the headers describe an uncompressed JSON body in UTF-8. The content type may be missing.

    Args:
        headers: headers with lower-case names.

    Raises:
        HttpRefusal: 415 for anything else.
    """
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        message, cure = f"the body's content-encoding is {coding!r}", "send the body uncompressed"
        raise unsupported(message, "identity", cure, header="accept-encoding")
    given, _, parameters = headers.get("content-type", JSON_TYPE).partition(";")
    media_type = given.strip().lower()
    if media_type != JSON_TYPE and not media_type.endswith("+json"):
        raise unsupported(f"the body is {media_type!r}", JSON_TYPE, f"send the header content-type: {JSON_TYPE}")
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in _CHARSETS:
            raise unsupported(f"the body's charset is {charset!r}", JSON_TYPE, "send the JSON in UTF-8")


def unsupported(message: str, allowed: str, cure: str, *, header: str = "accept") -> HttpRefusal:
    """Returns an error with status 415, whose answer lists what is accepted in `header`."""
    headers = {header: allowed}
    return HttpRefusal(415, "unsupported_media_type", message, allowed=(allowed,), cure=cure, headers=headers)
