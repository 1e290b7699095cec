"""The nodes that served each session last, in memory that all processes of one gateway share.

Two processes that note the same session at the same moment may lose one of the two notes, which costs a cached prefix
at most.
"""

import hashlib
import mmap
import os

_NUMBER_BYTES = 8
_SETS, _WAYS = 8192, 8  # a session's entry is one of the ways of one set
_USED, _FIRST_NODE = 1, 2  # columns after the key
_WIDTH = 4
_BYTES = _SETS * _WAYS * _WIDTH * _NUMBER_BYTES


class SharedSessions:
    """The entries of the sessions that were used last, each with one node of each role.

    Args:
        fd: descriptor of the memory that `create` made.
    """

    def __init__(self, fd: int) -> None:
        self._numbers = memoryview(mmap.mmap(fd, _BYTES)).cast("q")

    @staticmethod
    def create() -> int:
        """Makes the memory; returns its file descriptor, to pass on."""
        fd = os.memfd_create("baton-sessions")
        os.ftruncate(fd, _BYTES)
        return fd

    def nodes(self, session_id: str) -> tuple[int, ...]:
        """The keys of the session's nodes; 0: none in this role."""
        session = key_of(session_id)
        for entry in self._set(session):
            if self._numbers[entry] == session:
                return tuple(self._numbers[entry + _FIRST_NODE : entry + _WIDTH])
        return ()

    def note(self, session_id: str, role: int, node: int) -> None:
        """Records the node, by its key, as the session's last one in its role, 0 or 1."""
        session = key_of(session_id)
        entries = self._set(session)
        found = next((entry for entry in entries if self._numbers[entry] == session), None)
        if found is None:
            found = min(entries, key=lambda entry: self._numbers[entry + _USED])
            self._numbers[found + _FIRST_NODE] = self._numbers[found + _FIRST_NODE + 1] = 0
            self._numbers[found] = session
        self._numbers[found + _FIRST_NODE + role] = node
        self._numbers[found + _USED] = 1 + max(self._numbers[entry + _USED] for entry in entries)

    @staticmethod
    def _set(session: int) -> range:
        start = session % _SETS * _WAYS * _WIDTH
        return range(start, start + _WAYS * _WIDTH, _WIDTH)


def key_of(text: str) -> int:
    """A number that stands for a session or an address; never 0."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) or 1
