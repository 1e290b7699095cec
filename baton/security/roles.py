"""The roles of processes, and the names that stand for them in certificates.

A server identifies its caller by a URI such as `spiffe://baton/prefill`; a caller identifies its server by a DNS name
such as `prefill.baton`. The DNS name `node.baton` stands for a node of either kind. A certificate of the role `node`
is valid for both kinds, for nodes that switch between them.
"""

from collections.abc import Iterable
from enum import StrEnum

from baton.core.errors import Unauthenticated

_URI = "spiffe://baton/"
_DOMAIN = ".baton"


class Role(StrEnum):
    """A role in the cluster. An `operator` is a person or tool; a `node` may act as prefill node and as decode node."""

    PREFILL = "prefill"
    DECODE = "decode"
    NODE = "node"
    GATEWAY = "gateway"
    OPERATOR = "operator"


NODE = f"node{_DOMAIN}"
_OF_NODES = (Role.PREFILL, Role.DECODE)


def uri_of(role: Role) -> str:
    return f"{_URI}{role}"


def name_of(role: Role) -> str:
    return f"{role}{_DOMAIN}"


def dns_names_of(role: Role) -> tuple[str, ...]:
    """Returns the DNS names that a certificate of this role must have."""
    if role is Role.NODE:
        return (*map(name_of, _OF_NODES), NODE)
    return (name_of(role), NODE) if role in _OF_NODES else (name_of(role),)


def allows(certified: Role, role: Role) -> bool:
    """Whether a certificate of the role `certified` is valid for `role`."""
    return certified is role or (certified is Role.NODE and role in _OF_NODES)


def role_of(uris: Iterable[str]) -> Role:
    """Returns the role that a certificate's URIs name.

    Raises:
        Unauthenticated: the URIs name no role, or several.
    """
    named = [uri.removeprefix(_URI) for uri in uris if uri.startswith(_URI)]
    allowed = tuple(uri_of(role) for role in Role)
    if len(named) != 1 or named[0] not in set(Role):
        raise Unauthenticated(
            "the caller's certificate names no role of Baton, or several", field="certificate", allowed=allowed,
            cure="use a certificate with exactly one of these URIs; `baton certs` makes such certificates",
        )  # fmt: skip
    return Role(named[0])
