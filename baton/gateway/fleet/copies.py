"""Which copies of the weights may serve next to each other. Pure.

Copies of one revision have equal bytes unless one is damaged or edited. Answers of two such copies would be mixed, so
only one of them serves.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from baton.protos.v1 import node_status_pb2
from baton.rpc.revisions import revision_of

# A lost node may come back within this time, so its copy counts: without it a damaged copy would serve while a good one
# restarts. After it, a node that is gone for good refuses nobody.
_LOST_COUNTS_S = 600.0
_LOOK_EACH_S = 10.0


class _Place(NamedTuple):
    """Where a node is reached."""

    role: node_status_pb2.Role.ValueType
    address: str


@dataclass
class _Copy:
    """One node's copy, and when the node last sent a status."""

    name: str
    revision: str
    digest: str
    seen_s: float


class Copies:
    """The copies that this gateway's nodes have, and the one of each revision that serves.

    Statuses come often and copies change seldom, so the choice is made anew only when one has changed: with 256 nodes,
    a choice at each status took 6 cores.
    """

    def __init__(self) -> None:
        self._copies: dict[_Place, _Copy] = {}
        self._chosen: dict[str, str] = {}  # digest by revision
        self._looked_at_s = 0.0

    def differs(
        self,
        role: node_status_pb2.Role.ValueType,
        address: str,
        name: str,
        model: node_status_pb2.ModelIdentity,
        now_s: float,
    ) -> str:
        """Records a node's copy; returns why the node cannot serve next to the others, empty when it can.

        Older nodes have no digest, and can.
        """
        place = _Place(role, address)
        if not model.content_digest:
            self.forget(role, address)
            return ""
        copy = _Copy(name, revision_of(model), model.content_digest, now_s)
        known = self._copies.get(place)
        self._copies[place] = copy
        is_new = known is None or (known.revision, known.digest) != (copy.revision, copy.digest)
        if is_new or now_s - self._looked_at_s > _LOOK_EACH_S:
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
        """The node is gone, or has no digest."""
        if self._copies.pop(_Place(role, address), None) is not None:
            self._choose(self._looked_at_s)

    def _choose(self, now_s: float) -> None:
        """The copy that most nodes have serves; of equally many one that decode nodes have, which serve without others
        too; then the one with the lower digest, so that all gateways choose alike."""
        self._looked_at_s = now_s
        self._copies = {place: copy for place, copy in self._copies.items() if now_s - copy.seen_s <= _LOST_COUNTS_S}
        count = Counter((copy.revision, copy.digest) for copy in self._copies.values())
        decoding = {
            (copy.revision, copy.digest)
            for place, copy in self._copies.items()
            if place.role == node_status_pb2.ROLE_DECODE
        }
        best = sorted(count, key=lambda copy: (-count[copy], copy not in decoding, copy))
        self._chosen = dict(reversed(best))
