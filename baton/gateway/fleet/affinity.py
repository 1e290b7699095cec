"""The nodes that served each session last, of this process or of all processes of a gateway."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from baton.gateway.core.shared_sessions import SharedSessions, key_of
from baton.protos.v1 import node_status_pb2


class Affinity(Protocol):
    """The last prefill and decode node of each session."""

    def nodes(self, session_id: str) -> frozenset[str]:
        """The addresses of the nodes that served the session last."""
        ...

    def note(self, session_id: str, role: int, address: str) -> None:
        """Records that a request of the session goes to this node. Empty: it has no session."""
        ...


class OwnAffinity:
    """The sessions of one process.

    Args:
        max_sessions: number of sessions kept; beyond it the least recently used one is dropped.
    """

    def __init__(self, max_sessions: int = 65536) -> None:
        self._max_sessions = max_sessions
        self._nodes: OrderedDict[str, dict[int, str]] = OrderedDict()

    def nodes(self, session_id: str) -> frozenset[str]:
        return frozenset(self._nodes.get(session_id, {}).values())

    def note(self, session_id: str, role: int, address: str) -> None:
        if not session_id:
            return
        self._nodes.setdefault(session_id, {})[role] = address
        self._nodes.move_to_end(session_id)
        if len(self._nodes) > self._max_sessions:
            self._nodes.popitem(last=False)


class SharedAffinity:
    """The sessions of all processes of a gateway.

    Args:
        addresses: returns the addresses of all nodes that this process knows.
    """

    def __init__(self, sessions: SharedSessions, addresses: Callable[[], Iterable[str]]) -> None:
        self._sessions = sessions
        self._addresses = addresses
        self._by_key: dict[int, str] = {}

    def nodes(self, session_id: str) -> frozenset[str]:
        keys = [key for key in self._sessions.nodes(session_id) if key]
        if any(key not in self._by_key for key in keys):
            self._by_key = {key_of(address): address for address in self._addresses()}
        return frozenset(self._by_key[key] for key in keys if key in self._by_key)

    def note(self, session_id: str, role: int, address: str) -> None:
        if session_id:
            self._sessions.note(session_id, int(role == node_status_pb2.ROLE_DECODE), key_of(address))
