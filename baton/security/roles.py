"""The roles that a certificate can name, and what they look like in it.

A role is a URI, `spiffe://baton/prefill`, by which a server knows its caller, and a DNS name, `prefill.baton`, by which
a caller knows its server. The DNS name `node.baton` says: a node of either kind. The role `node` is for nodes that
switch between the two kinds: its certificate is good for both.
"""

from collections.abc import Iterable
from enum import StrEnum

from baton.core.errors import Unauthenticated

_URI = "spiffe://baton/"
_DOMAIN = ".baton"


class Role(StrEnum):
    """What a process of the cluster is; `operator` is a person or a tool that looks after it, `node` a node that may be
    a prefill node or a decode node."""

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
    """The names that a certificate of this role has."""
    if role is Role.NODE:
        return (*map(name_of, _OF_NODES), NODE)
    return (name_of(role), NODE) if role in _OF_NODES else (name_of(role),)


def allows(certified: Role, role: Role) -> bool:
    """Whether a process with a certificate of the first role may have the second one."""
    return certified is role or (certified is Role.NODE and role in _OF_NODES)


def role_of(uris: Iterable[str]) -> Role:
    """The role that these URIs of a certificate name.

    Raises:
        Unauthenticated: they name none, or several.
    """
    named = [uri.removeprefix(_URI) for uri in uris if uri.startswith(_URI)]
    allowed = tuple(uri_of(role) for role in Role)
    if len(named) != 1 or named[0] not in set(Role):
        raise Unauthenticated(
            "the caller's certificate names no role of Baton, or several", field="certificate", allowed=allowed,
            cure="give it one of these URIs as its only one; `baton certs` makes such certificates",
        )  # fmt: skip
    return Role(named[0])
