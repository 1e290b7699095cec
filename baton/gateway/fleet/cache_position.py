"""Position of a gateway in the stream of one node's prefix cache changes. Pure."""

from baton.protos.internal.v1 import node_pb2


class CachePosition:
    """Position in one node's stream of cache changes.

    Attributes:
        known: whether at least the beginning of a snapshot has arrived.
        sequence: sequence number of the last complete batch or snapshot; 0 before the first one.
    """

    def __init__(self) -> None:
        self.known = False
        self.sequence = 0
        self._in_snapshot = 0  # sequence number of a snapshot that is not complete yet

    def follows(self, batch: node_pb2.WatchCacheResponse) -> bool:
        """Advances to this batch and returns True; returns False if batches before it are missing."""
        if self._in_snapshot and not batch.snapshot:
            if batch.sequence != self._in_snapshot:
                return False
        elif not batch.snapshot and not (self.known and batch.sequence == self.sequence + 1):
            return False
        self.known = True
        self._in_snapshot = batch.sequence if batch.more else 0
        self.sequence = 0 if batch.more else batch.sequence
        return True
