"""Decides which nodes' copies of the weights may serve together. Pure.

Copies of one revision have equal bytes unless one is damaged or edited. One answer may come from several nodes, so of
differing copies only one serves.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from baton.protos.v1 import node_status_pb2
from baton.rpc.revisions import revision_of

# A lost node's copy counts for this long. Else a damaged copy would serve while a node with a good one restarts. After
# it, the copy of a node that is gone for good excludes no other.
_LOST_COUNTS_S = 600.0
_CHOOSE_EVERY_S = 10.0


class _NodeKey(NamedTuple):
    """Key of a node."""

    role: node_status_pb2.Role.ValueType
    address: str


@dataclass
class _Copy:
    """One node's copy of the weights, and the time of the node's last status."""

    name: str
    revision: str
    digest: str
    seen_s: float


class Copies:
    """The copies of all nodes, and the copy of each revision that serves.

    The choice is repeated only when a copy has changed or after a while: with 256 nodes, a choice at each status took
    6 cores.
    """

    def __init__(self) -> None:
        self._copies: dict[_NodeKey, _Copy] = {}
        self._chosen: dict[str, str] = {}  # digest by revision
        self._chosen_at_s = 0.0

    def mismatch(
        self,
        role: node_status_pb2.Role.ValueType,
        address: str,
        name: str,
        model: node_status_pb2.ModelIdentity,
        now_s: float,
    ) -> str:
        """Records a node's copy; returns why the node may not serve, or "" if it may.

        Older nodes report no digest and may always serve.
        """
        key = _NodeKey(role, address)
        if not model.content_digest:
            self.forget(role, address)
            return ""
        copy = _Copy(name, revision_of(model), model.content_digest, now_s)
        known = self._copies.get(key)
        self._copies[key] = copy
        is_new = known is None or (known.revision, known.digest) != (copy.revision, copy.digest)
        if is_new or now_s - self._chosen_at_s > _CHOOSE_EVERY_S:
            self._choose(now_s)
        chosen = self._chosen[copy.revision]
        if chosen == copy.digest:
            return ""
        holders = (
            each.name for each in self._copies.values() if (each.revision, each.digest) == (copy.revision, chosen)
        )
        return (
            f"its weights differ in some bytes from those of {', '.join(holders)} (content digest {copy.digest[:12]}, "
            f"theirs {chosen[:12]}): one copy is damaged or edited; compare its files with their publisher's, and copy "
            "it again"
        )

    def forget(self, role: node_status_pb2.Role.ValueType, address: str) -> None:
        """Drops the copy of a node that was removed or reports no digest."""
        if self._copies.pop(_NodeKey(role, address), None) is not None:
            self._choose(self._chosen_at_s)

    def _choose(self, now_s: float) -> None:
        """Chooses the copy of each revision that most nodes have.

        On a tie, a copy on a decode node goes first, since decode nodes can serve alone. Then the lower digest goes
        first, so that all gateways choose alike.
        """
        self._chosen_at_s = now_s
        self._copies = {key: copy for key, copy in self._copies.items() if now_s - copy.seen_s <= _LOST_COUNTS_S}
        count = Counter((copy.revision, copy.digest) for copy in self._copies.values())
        decoding = {
            (copy.revision, copy.digest)
            for key, copy in self._copies.items()
            if key.role == node_status_pb2.ROLE_DECODE
        }
        best = sorted(count, key=lambda copy: (-count[copy], copy not in decoding, copy))
        self._chosen = dict(reversed(best))
