"""The caller whose request the current task serves. The server sets it before the handler runs."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from baton.security.authorize import ALL_RIGHTS, Right
from baton.security.limits import UNLIMITED, Budget


@dataclass(frozen=True)
class Caller:
    """The client or process that makes a call.

    Attributes:
        name: the key's name, or else the host; the same for all calls of one client. Fair shares are per name.
        rights: what the caller may do.
        proved: whether a credential proves the name. Only then are the caller's cached prefixes kept apart.
        budget: what is left of the caller's limits.
    """

    name: str
    rights: frozenset[Right]
    proved: bool = False
    budget: Budget = UNLIMITED

    def salt(self, given: str) -> str:
        """Returns the cache salt of a request that gives this salt. Two proved callers never share a salt."""
        return salt_of(self.name, given) if self.proved else given

    @property
    def tenant(self) -> int:
        """A number of the caller, 64 bits, by which nodes bound what they keep for it."""
        return int.from_bytes(hashlib.sha256(b"baton tenant\0" + self.name.encode()).digest()[:8], "little")

    def session(self, given: str) -> str:
        """Returns a session name that no other caller can have; empty if the request names no session."""
        return f"{self.name}\0{given}" if given else ""

    @property
    def ends_only(self) -> str | None:
        """Name of the only client whose requests this caller may end; None if it may end everybody's."""
        return self.name if self.proved and Right.OPERATOR not in self.rights else None


NOBODY = Caller("", frozenset({Right.ANYONE}))
EVERYBODY = Caller("", ALL_RIGHTS)

# The server sets it for each call, in the task that serves the call. Tasks started there inherit it.
_CALLER: ContextVar[Caller] = ContextVar("baton_caller", default=EVERYBODY)


def salt_of(client: str, given: str) -> str:
    """Returns the cache salt of requests of a proved caller of this name that give this salt."""
    return hashlib.sha256(b"baton cache salt\0" + f"{len(client)}:{client}{given}".encode()).hexdigest()


def current() -> Caller:
    """Returns the caller of the current task; EVERYBODY, who may do anything, where no server has set one."""
    return _CALLER.get()


def enter(caller: Caller) -> None:
    """Sets the caller of the current task."""
    _CALLER.set(caller)


def host_of(peer: str) -> str:
    """Returns the host in gRPC's name of a peer, such as ipv4:10.0.0.1:4711, ipv6:%5B::1%5D:4711 or unix:."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind or "unknown"
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
