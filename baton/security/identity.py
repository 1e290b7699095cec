"""Who makes the call that this task serves. The server finds it out before the handler runs."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from baton.security.authorize import ALL_RIGHTS, Right
from baton.security.limits import UNLIMITED, Budget


@dataclass(frozen=True)
class Caller:
    """One caller.

    Attributes:
        name: the same for all calls of one client: the name of its key, or its host. Fair shares go by it.
        rights: what it may do.
        proved: whether it has proved its name, so that its cached prefixes are its own.
        budget: its limits.
    """

    name: str
    rights: frozenset[Right]
    proved: bool = False
    budget: Budget = UNLIMITED

    def salt(self, given: str) -> str:
        """The cache salt of its request, from the one that it gave. Two callers never get the same one."""
        if not self.proved:
            return given
        return hashlib.sha256(b"baton cache salt\0" + f"{len(self.name)}:{self.name}{given}".encode()).hexdigest()

    def session(self, given: str) -> str:
        """The name of its session, from the one that it gave: no other caller's has the same. Empty: it named none."""
        return f"{self.name}\0{given}" if given else ""

    @property
    def ends_only(self) -> str | None:
        """The client whose requests it may end; None: it may end all."""
        return self.name if self.proved and Right.OPERATOR not in self.rights else None


NOBODY = Caller("", frozenset({Right.ANYONE}))
EVERYBODY = Caller("", ALL_RIGHTS)

# Set by the server for each call, in the task that serves it; tasks that it starts inherit it.
_CALLER: ContextVar[Caller] = ContextVar("baton_caller", default=EVERYBODY)


def current() -> Caller:
    """The caller of this task. Outside of a server that identifies callers, one who may do anything."""
    return _CALLER.get()


def enter(caller: Caller) -> None:
    """From now on, this task serves that caller."""
    _CALLER.set(caller)


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer, such as ipv4:10.0.0.1:4711, ipv6:%5B::1%5D:4711 or unix:."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind or "unknown"
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
