"""What a store remembers of what other processes have left: entries that it has seen there, in bounded memory. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from baton.core.kv_entries import EntryKey

_MOST = 1 << 15


class KnownDigests:
    """Entries that were there when this process last asked. Any thread may call it.

    Args:
        most: how many are remembered; the latest ones.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()  # by digest
        self._lost: list[bytes] = []
        self._lock = Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._roots

    def seen(self, keys: Iterable[EntryKey]) -> None:
        """These are there."""
        with self._lock:
            for key in keys:
                self._roots[key.block.digest] = key.root
                self._roots.move_to_end(key.block.digest)
            while len(self._roots) > self._most:
                self._lost.append(self._roots.popitem(last=False)[0])

    def missed(self, keys: Iterable[EntryKey]) -> None:
        """These are not there."""
        self.missed_digests(key.block.digest for key in keys)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """No entry with one of these roots is there."""
        self.missed_digests([digest for digest, root in list(self._roots.items()) if root in roots])

    def missed_digests(self, digests: Iterable[bytes]) -> None:
        """The entries with these digests are not there."""
        with self._lock:
            self._lost += [digest for digest in digests if self._roots.pop(digest, None) is not None]

    def take_lost(self) -> list[bytes]:
        """Digests that are not known any more, since the last call."""
        if not self._lost:
            return []
        with self._lock:
            lost, self._lost = self._lost, []
        return lost
