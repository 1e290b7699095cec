"""A store for a whole cluster: Mooncake Store, reached over TCP.

Mooncake keeps objects under names, evicts them and may lose them. An object's name is that of the entry; its header
repeats the tokens, so that two entries of equal digest are not taken for each other. What a node does while the store
is gone is in `mooncake_process`.
"""

import logging
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from threading import Lock

import numpy as np

from baton.core.block_keys import DIGEST_BYTES
from baton.core.errors import ConfigError
from baton.core.kv_entries import EntryKey, KeepTime
from kvtransfer.stores.known_digests import KnownDigests
from kvtransfer.stores.mooncake_process import MooncakeProcess
from kvtransfer.stores.store import Store, StoreCounters

log = logging.getLogger("baton")

FIELD = "kv_store"
FORM = "mooncake://HOST:PORT"
DEFAULT_PORT = 50051  # of mooncake_master

_URL = re.compile(r"mooncake://(?P<host>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(:(?P<port>[0-9]{1,5}))?/?")
_CONNECT_S = 3.0
_DROP_ROOTS_S = 30.0
# Keys of one call: a message to the process has a maximum size.
_KEYS_MAX = 256
# Roots of one pattern.
_ROOTS_MAX = 64

# Codes of Mooncake.
_WRITTEN, _OTHER_SIZE = 0, -600
# Not there, not yet written by another node, or just removed.
_MISSES = frozenset({-704, -703, -712})

_PREFIX = "baton"
_MAGIC = b"batonkv1"
_HEADER = struct.Struct("<8sQII")  # magic, bytes of the entry, its index, bytes of its tokens
HEADER_BYTES = 512


def open_mooncake(url: str, namespace: bytes, entry_bytes: int) -> Store:
    """Opens the store. It need not be there: until it is, there are only misses.

    Args:
        url: `mooncake://HOST:PORT` of the master.
        namespace: equal for ranks that can read each other's entries.
        entry_bytes: size of every entry.

    Raises:
        ConfigError: the URL is wrong, or Mooncake's client is not installed or cannot be loaded.
    """
    host, port = parse_mooncake_url(url)
    if find_spec("mooncake") is None:
        raise ConfigError(
            "the client of Mooncake Store is not installed",
            field=FIELD,
            value=url,
            cure="pip install 'baton-serving[mooncake]'",
        )
    process = MooncakeProcess(host, port, HEADER_BYTES + entry_bytes)
    ready = process.wait_ready(_CONNECT_S)
    if process.unusable:
        process.close()
        raise ConfigError(
            f"the client of Mooncake Store cannot be loaded: {process.unusable}",
            field=FIELD,
            value=url,
            cure="install the library that it misses; libibverbs.so.1 is in Debian's and Ubuntu's package libibverbs1",
        )
    if not ready:
        log.warning("Mooncake Store at %s:%d: not connected yet; until it is, all entries are misses", host, port)
    return MooncakeStore(process, namespace, entry_bytes)


def parse_mooncake_url(url: str) -> tuple[str, int]:
    """Host and port of the master.

    Raises:
        ConfigError: it is not of the form `mooncake://HOST:PORT`.
    """
    found = _URL.fullmatch(url)
    port = DEFAULT_PORT if found is None or found["port"] is None else int(found["port"])
    if found is None or not 0 < port < 1 << 16:
        raise ConfigError(
            f"{url!r} names no Mooncake Store",
            field=FIELD,
            value=url,
            allowed=(FORM,),
            cure=f"give a name or an IPv4 address of mooncake_master, and its port if that is not {DEFAULT_PORT}",
        )
    return found["host"], port


class MooncakeStore:
    """The cluster's store, as one rank uses it. It does not know how many entries the cluster keeps: its counters
    `entries`, `bytes` and `evicted` stay 0.
    """

    name = "mooncake"

    def __init__(self, process: MooncakeProcess, namespace: bytes, entry_bytes: int) -> None:
        self._process = process
        self._prefix = f"{_PREFIX}/{namespace.hex()}"
        self._entry_bytes = entry_bytes
        self._counters = StoreCounters()
        self._counting = Lock()
        self._known = KnownDigests()

    def has(self, keys: Sequence[EntryKey]) -> int:
        there, is_answered = self._count_first(keys)
        self._known.seen(keys[:there])
        self._known.missed(keys[there:] if is_answered else ())
        return there

    def _count_first(self, keys: Sequence[EntryKey]) -> tuple[int, bool]:
        """How many of the first keys it has, and whether all calls were answered. A node keeps a sequence from its
        beginning, so what comes after a missing entry is of no use."""
        names = [self._name(key) for key in keys]
        for start in range(0, len(names), _KEYS_MAX):
            found = self._call("has", names[start : start + _KEYS_MAX])
            if found is None:
                return start, False
            there = next((at for at, code in enumerate(found) if code != 1), len(found))
            if there < _KEYS_MAX:
                return start + there, True
        return len(names), True

    def first(self, keys: Sequence[EntryKey]) -> int:
        names = [self._name(key) for key in keys]
        for start in range(0, len(names), _KEYS_MAX):
            found = self._call("has", names[start : start + _KEYS_MAX]) or []
            there = next((at for at, code in enumerate(found) if code == 1), None)
            if there is not None:
                return start + there
        return len(names)

    def get(self, key: EntryKey, into: memoryview) -> bool:
        assert into.nbytes == self._entry_bytes
        found = self._get(key, into)
        (self._known.seen if found else self._known.missed)((key,))
        self._count(hits=int(found), misses=int(not found))
        return found

    def put(self, key: EntryKey, entry: memoryview) -> bool:
        assert entry.nbytes == self._entry_bytes
        name = self._name(key)
        try:
            with self._process.lane() as lane:
                if lane is None:
                    return False
                if lane.call("has", [name]) == [1]:
                    self._known.seen((key,))
                    return True
                lane.memory[:HEADER_BYTES] = self._header(key)
                _copy(entry, lane.memory[HEADER_BYTES:])
                (code,) = lane.call("put", [name])
        except OSError:
            code = None
        if code == _WRITTEN:
            self._known.seen((key,))
        self._count(written=int(code == _WRITTEN), failed=int(code != _WRITTEN))
        return code == _WRITTEN

    def keep(self, keys: Sequence[EntryKey], keep: KeepTime) -> None:
        """Does nothing: the cluster's master decides what leaves."""

    def drop(self, keys: Sequence[EntryKey]) -> None:
        names = [self._name(key) for key in keys]
        self._known.missed(keys)
        for start in range(0, len(names), _KEYS_MAX):
            self._call("remove", names[start : start + _KEYS_MAX])

    def drop_roots(self, roots: frozenset[bytes]) -> int | None:
        self._known.drop_roots(roots)
        texts, dropped = sorted(root.hex() for root in roots), 0
        for start in range(0, len(texts), _ROOTS_MAX):
            any_root = "|".join(texts[start : start + _ROOTS_MAX])
            removed = self._call("remove_matching", [f"^{_PREFIX}/[0-9a-f]+/({any_root})/.*$"], _DROP_ROOTS_S)
            if removed is None or removed[0] < 0:
                return None
            dropped += removed[0]
        return dropped

    def knows(self, digest: bytes) -> bool:
        return digest in self._known

    def take_lost(self) -> Sequence[bytes]:
        return self._known.take_lost()

    def found(self, most: int) -> Sequence[EntryKey]:  # noqa: ARG002
        """None: to list the cluster's objects would take long, and most of them may be others'."""
        return ()

    def counters(self) -> StoreCounters:
        return self._counters

    def close(self) -> None:
        self._process.close()

    def _name(self, key: EntryKey) -> str:
        return f"{self._prefix}/{key.root.hex()}/{key.block.digest.hex()}"

    def _header(self, key: EntryKey) -> bytes:
        tokens = key.block.tokens
        assert _HEADER.size + DIGEST_BYTES + len(tokens) <= HEADER_BYTES
        header = _HEADER.pack(_MAGIC, self._entry_bytes, key.number, len(tokens)) + key.block.parent + tokens
        return header.ljust(HEADER_BYTES, b"\0")

    def _get(self, key: EntryKey, into: memoryview) -> bool:
        name = self._name(key)
        try:
            with self._process.lane() as lane:
                if lane is None:
                    return False
                (code,) = lane.call("get", [name])
                if code == HEADER_BYTES + self._entry_bytes:
                    header = bytes(lane.memory[:HEADER_BYTES])
                    if header == self._header(key):
                        _copy(lane.memory[HEADER_BYTES:], into)
                        return True
                    if header.startswith(_MAGIC):  # other tokens of the same digest
                        return False
                elif code < 0 and code != _OTHER_SIZE:
                    self._count(failed=int(code not in _MISSES))
                    return False
                # As long as it is there, Mooncake does not take another in its place.
                lane.call("remove", [name])
        except OSError:
            self._count(failed=1)
            return False
        self._count(damaged=1)
        return False

    def _call(self, name: str, keys: Sequence[str], timeout_s: float | None = None) -> list[int] | None:
        """The codes of a call. None: there was no answer."""
        try:
            with self._process.lane() as lane:
                return None if lane is None else lane.call(name, keys, timeout_s)
        except OSError:
            self._count(failed=1)
            return None

    def _count(self, **more: int) -> None:
        with self._counting:
            now = self._counters
            self._counters = replace(now, **{name: getattr(now, name) + number for name, number in more.items()})


def _copy(source: memoryview, to: memoryview) -> None:
    """Copies without the interpreter's lock, which a copy of memoryviews holds."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
