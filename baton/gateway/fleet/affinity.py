"""Which nodes served a session last, for a bounded number of sessions. Pure."""

from collections import OrderedDict


class Affinity:
    """The last prefill and decode node of each session.

    Args:
        max_sessions: beyond it the session that was quiet for longest is forgotten.
    """

    def __init__(self, max_sessions: int = 65536) -> None:
        self._max_sessions = max_sessions
        self._nodes: OrderedDict[str, dict[int, str]] = OrderedDict()

    def nodes(self, session_id: str) -> frozenset[str]:
        """The addresses of the nodes that served the session last."""
        return frozenset(self._nodes.get(session_id, {}).values())

    def note(self, session_id: str, role: int, address: str) -> None:
        """The session's request goes to this node."""
        if not session_id:
            return
        self._nodes.setdefault(session_id, {})[role] = address
        self._nodes.move_to_end(session_id)
        if len(self._nodes) > self._max_sessions:
            self._nodes.popitem(last=False)
