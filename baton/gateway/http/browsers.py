"""What keeps web pages away from a gateway without keys: every page in a browser on this machine can reach its port.

A page's requests without a preflight have one of a few content types, or none, and never application/json. A page whose
own name has been made to resolve to this machine (DNS rebinding) sends its own name as the host. Neither needs a rule
about origins, and answers have no CORS headers, so no page of another origin reads one.
"""

import ipaddress
from collections.abc import Mapping

from baton.gateway.http.errors import HttpRefusal
from baton.gateway.http.head import JSON_TYPE, unsupported

_CURE = "set keys (BATON_API_KEYS), or have the proxy send the address that it connects to as the host"


def check_not_a_page(method: str, headers: Mapping[str, str], *, listen_host: str | None) -> None:
    """Args:
        headers: with lower-case names.
        listen_host: where the gateway listens, if only this machine reaches that; None: others do, by names that are
            not known.

    Raises:
        Refused: 403 for another host's name, 415 for a body that does not say that it is JSON.
    """
    if listen_host is not None and not _is_own(headers.get("host", ""), listen_host):
        message = f"this gateway is not {headers.get('host', '')!r}"
        allowed = ("localhost", "an IP address")
        raise HttpRefusal(403, "foreign_host", message, field="host", allowed=allowed, cure=_CURE)
    if method == "POST" and "content-type" not in headers:
        raise unsupported("the body has no type", JSON_TYPE, f"send the header content-type: {JSON_TYPE}")


def _is_own(host: str, listen_host: str) -> bool:
    """Whether a browser sends that host only for pages that this machine, or an address without a name, has served."""
    if not host:  # no browser
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
