"""The blocks that the stores outside of the cache have, as far as this engine knows. Pure.

Followers of the cache see them as cached: a request that arrives at this node finds them, and need not compute them.
"""

from collections.abc import Iterable, Iterator

from baton.core.block_keys import BlockKey, KeyChain, block_keys_of
from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.engine.request import IntArray
from baton.engine.scheduling.block_manager import CacheChanges

_CHANGES_MIN = 1024
# Entries that are in a store below host memory alone, and that followers see: a file store may have millions. The
# latest ones.
_BELOW_MAX = 1 << 14
# Entries that the stores have lost, and that the cache may have still; the latest ones.
_LEFT_MAX = 1 << 14
_TOKEN_BYTES = 4


class KeptBlocks:
    """Blocks by the entries that end them: a block that begins in one entry and ends in the next counts to the next,
    because stores evict the end of a sequence first.

    Attributes:
        entry_keys: keys of entries by parent and tokens, so that a sequence that begins with them need not hash them
            again. Only keys that this node has computed: those of files and of other nodes are not trusted.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.entry_keys: dict[tuple[bytes, bytes], BlockKey] = {}
        self._names: dict[bytes, BlockKey] = {}  # the same keys by digest
        self._by_entry: dict[bytes, tuple[BlockKey, ...]] = {}
        self._entries: dict[bytes, EntryKey] = {}  # the same ones by digest
        self._left: dict[bytes, tuple[EntryKey, tuple[BlockKey, ...]]] = {}  # lost by the stores, the oldest first
        self._below: dict[bytes, None] = {}  # entries that host memory does not have, the oldest first
        self._ends: dict[bytes, bytes] = {}  # by block, the entry that ends it
        self._lost_since: list[set[bytes]] = []  # what has been lost since each call of `found` began
        self._changes: CacheChanges | None = None

    def kept(self, entries: Iterable[EntryKey], keys: KeyChain, tokens: IntArray) -> None:
        """The stores have these entries of a sequence, or will have them soon; `keys` are those of its blocks."""
        size = self._block_size
        for entry in entries:
            digest, content, parent = entry.block
            self._names[digest] = self.entry_keys[parent, content] = entry.block
            if digest in self._by_entry:
                self._move(digest, is_below=False)
                continue
            start = entry.number * ENTRY_TOKENS
            self._add(entry, tuple(keys.run(start // size, (start + ENTRY_TOKENS) // size, tokens)))

    def below(self, digests: Iterable[bytes]) -> None:
        """Host memory no longer has the entries with these digests, but a store below it does."""
        for digest in digests:
            self._move(digest, is_below=True)

    def found(self, entries: Iterable[EntryKey]) -> Iterator[None]:
        """A store below host memory has these entries, each after the one before it in its sequence, but for those that
        are lost from now on. Those whose beginning is not among them are of no use. Adds one for each step, so that
        other tasks can run in between."""
        lost: set[bytes] = set()
        self._lost_since.append(lost)
        return self._add_found(entries, lost)

    def _add_found(self, entries: Iterable[EntryKey], lost: set[bytes]) -> Iterator[None]:
        ends: dict[bytes, tuple[bytes, bytes]] = {}  # by entry: the last block so far, and the tokens after it
        for entry in entries:
            before = (entry.root, b"") if not entry.number else ends.get(entry.block.parent)
            if before is not None and entry.block.digest not in lost:
                ends[entry.block.digest] = self._add_below(entry, *before)
            yield
        self._lost_since = [each for each in self._lost_since if each is not lost]

    def _add_below(self, entry: EntryKey, parent: bytes, rest: bytes) -> tuple[bytes, bytes]:
        """Adds an entry that a store below host memory has, unless it is known. Returns its last block, and the tokens
        after that.

        Args:
            parent, rest: the same of the entry before it.
        """
        tokens = rest + entry.block.tokens
        blocks = block_keys_of(parent, tokens, self._block_size * _TOKEN_BYTES)
        if entry.block.digest not in self._by_entry:
            self._add(entry, tuple(blocks))
            self._move(entry.block.digest, is_below=True)
        rest = tokens[len(blocks) * self._block_size * _TOKEN_BYTES :]
        return (blocks[-1].digest if blocks else parent), rest

    def has(self, entry: EntryKey) -> bool:
        """Whether the stores have this entry, or will have it soon."""
        return entry.block.digest in self._by_entry

    def blocks_of_lost(self, entry: EntryKey) -> tuple[BlockKey, ...]:
        """The blocks of an entry that this node has computed, and that the stores have lost. Empty: it is not one of
        the latest ones, or the key is not the one that was computed."""
        key, blocks = self._left.get(entry.block.digest, (None, ()))
        return blocks if key == entry else ()

    def kept_again(self, entries: Iterable[EntryKey]) -> None:
        """The stores will soon have these entries of `blocks_of_lost` again."""
        for entry in entries:
            _, blocks = self._left.pop(entry.block.digest)
            digest, content, parent = entry.block
            self._names[digest] = self.entry_keys[parent, content] = entry.block
            if digest not in self._by_entry:
                self._add(entry, blocks)

    def lost(self, digests: Iterable[bytes]) -> None:
        """The stores no longer have the entries with these digests."""
        gone: list[bytes] = []
        for digest in digests:
            for lost in self._lost_since:
                lost.add(digest)
            self._below.pop(digest, None)
            entry, blocks = self._entries.pop(digest, None), self._by_entry.pop(digest, ())
            if (name := self._names.pop(digest, None)) is not None:
                del self.entry_keys[name.parent, name.tokens]
                if entry is not None:
                    self._left[digest] = entry, blocks
            for key in blocks:
                if self._ends.get(key.digest) == digest:  # files may give a block two names
                    del self._ends[key.digest]
                    gone.append(key.digest)
        while len(self._left) > _LEFT_MAX:
            del self._left[next(iter(self._left))]
        if gone and self._changes is not None:
            self._changes.update(dict.fromkeys(gone))
            self._check_changes()

    def lost_roots(self, roots: frozenset[bytes]) -> None:
        """The stores no longer have any entry with one of these roots."""
        self.lost([digest for digest, entry in self._entries.items() if entry.root in roots])
        self._left = {digest: left for digest, left in self._left.items() if left[0].root not in roots}

    # ---- following

    def cached_keys(self) -> list[BlockKey]:
        ends = self._ends
        return [key for entry, blocks in self._by_entry.items() for key in blocks if ends.get(key.digest) == entry]

    def cached_key(self, digest: bytes) -> BlockKey | None:
        entry = self._ends.get(digest)
        return None if entry is None else next(key for key in self._by_entry[entry] if key.digest == digest)

    def not_shown(self, digests: Iterable[bytes]) -> list[bytes]:
        return self.lacking(digests)

    def follow(self) -> None:
        self._changes = {}

    def take_changes(self) -> CacheChanges | None:
        changes = self._changes
        if changes:
            self._changes = {}
        return changes

    def lacking(self, digests: Iterable[bytes]) -> list[bytes]:
        return [digest for digest in digests if digest not in self._ends]

    def outside(self, digests: Iterable[bytes]) -> list[bytes]:
        return list(digests)

    def only_below(self, outside: Iterable[bytes]) -> list[bytes]:
        if not self._below:
            return []
        return [digest for digest in outside if self._ends.get(digest, b"") in self._below]

    def _add(self, entry: EntryKey, blocks: tuple[BlockKey, ...]) -> None:
        digest = entry.block.digest
        self._left.pop(digest, None)
        self._by_entry[digest] = blocks
        self._entries[digest] = entry
        named = {key.digest: key for key in blocks}
        self._ends.update(dict.fromkeys(named, digest))
        self._note(named)

    def _move(self, digest: bytes, *, is_below: bool) -> None:
        """Records where a known entry is now; does nothing for others."""
        if digest not in self._by_entry or (digest in self._below) == is_below:
            return
        if is_below:
            self._below[digest] = None
        else:
            del self._below[digest]
        self._note({key.digest: key for key in self._by_entry[digest]})
        if len(self._below) > _BELOW_MAX:
            self.lost([next(iter(self._below))])

    def _note(self, blocks: dict[bytes, BlockKey]) -> None:
        if self._changes is not None:
            self._changes.update(blocks)
            self._check_changes()

    def _check_changes(self) -> None:
        assert self._changes is not None
        if len(self._changes) > len(self._ends) // 2 + _CHANGES_MIN:  # then reading all keys costs less
            self._changes = None
