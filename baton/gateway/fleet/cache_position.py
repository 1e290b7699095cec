"""How far a gateway has followed the prefix cache of one node, batch by batch. Pure."""

from baton.protos.internal.v1 import node_pb2


class CachePosition:
    """How far a gateway has followed one node's cache.

    Attributes:
        known: it has at least begun to receive a snapshot.
        sequence: of the last whole batch or snapshot; 0 before it.
    """

    def __init__(self) -> None:
        self.known = False
        self.sequence = 0
        self._in_snapshot = 0  # its sequence while more of it follows

    def follows(self, batch: node_pb2.WatchCacheResponse) -> bool:
        """Whether nothing is missing between the last batch and this one; if so, this one becomes the last."""
        if self._in_snapshot and not batch.snapshot:
            if batch.sequence != self._in_snapshot:
                return False
        elif not batch.snapshot and not (self.known and batch.sequence == self.sequence + 1):
            return False
        self.known = True
        self._in_snapshot = batch.sequence if batch.more else 0
        self.sequence = 0 if batch.more else batch.sequence
        return True
