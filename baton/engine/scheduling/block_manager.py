"""Reference counts of blocks, and the index of cached prefixes. Pure.

A block is free, or held as often as its reference count says (I1). Free blocks keep their content until they are
taken; blocks without reusable content are taken first, then the least recently used. A block may lack KV in layers
with a sliding window; it then serves only sequences that extend far enough beyond it that these layers do not read it.

Followers of the cache fetch its changes from time to time. They see only blocks that serve every sequence, so no block
that has KV without the recurrent state that a computation needs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from baton.core.block_keys import BlockKey, IntArray, KeyChain

CacheChanges = dict[bytes, BlockKey | None]  # by digest, the key of a block that is cached now, None where it is not
_CHANGES_MIN = 1024


class BlockManager:
    """Reference counts and the prefix index over blocks 0 to `num_blocks - 1`.

    Attributes:
        num_references: the sum of all reference counts.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_references = 0
        self._references = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._roots = [b""] * num_blocks  # of the blocks that have keys
        self._by_digest: dict[bytes, int] = {}
        self._by_content: dict[tuple[bytes, bytes], BlockKey] = {}  # the same keys by parent and tokens
        self._windowless: set[int] = set()
        self._unreported: set[int] = set()
        self._changes: CacheChanges | None = None
        # NOTE: an OrderedDict, because taking the first key of a plain dict gets slower with every key that was taken.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def match(
        self,
        chain: KeyChain,
        tokens: IntArray,
        max_blocks: int,
        *,
        window_blocks: int = 0,
        ends_after: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """The longest run of cached blocks at the start of `tokens` from which the next token can be computed. Takes no
        reference.

        Args:
            max_blocks: longest run to return.
            window_blocks: how many blocks before a token its layers with a sliding window read.
            ends_after: whether a run may end after this block of the sequence; None: after any.
        """
        blocks = self._run(chain, tokens, max_blocks)
        while True:
            while blocks and ends_after is not None and not ends_after(len(blocks) - 1):
                del blocks[-1]
            first_read = max(0, len(blocks) - window_blocks)
            lacking = [index for index in range(first_read, len(blocks)) if blocks[index] in self._windowless]
            if not lacking:
                return blocks
            del blocks[lacking[-1] :]

    def _run(self, chain: KeyChain, tokens: IntArray, max_blocks: int) -> list[int]:
        """The leading blocks of the sequence that are cached. Nothing is hashed for it: a cached block is found by its
        tokens, which takes a third of the time."""
        chain.add_known(tokens, max_blocks, self._by_content)
        blocks: list[int] = []
        by_digest, keys = self._by_digest, self._keys
        for key in chain.known_keys(max_blocks):
            block_id = by_digest.get(key.digest)
            if block_id is None or keys[block_id] != key:
                break
            blocks.append(block_id)
        return blocks

    def windows_from(self, block_ids: Sequence[int]) -> int:
        """After how many of the blocks all have the KV of layers with a sliding window."""
        if not self._windowless:
            return 0
        lacking = (index for index in reversed(range(len(block_ids))) if block_ids[index] in self._windowless)
        return 1 + next(lacking, -1)

    def num_free_without(self, cached: Iterable[int]) -> int:
        """How many blocks are free, not counting the given cached blocks."""
        return len(self._free) - list(map(self._references.__getitem__, cached)).count(0)

    def take(self, cached: Sequence[int], num_fresh: int) -> list[int]:
        """Holds the `cached` blocks and `num_fresh` free ones; returns all of them in this order."""
        assert self.num_free_without(cached) >= num_fresh, "the caller checks num_free_without first"
        for block_id in cached:
            if self._references[block_id] == 0:
                del self._free[block_id]
            self._references[block_id] += 1
        self.num_references += len(cached) + num_fresh
        fresh = [self._free.popitem(last=False)[0] for _ in range(num_fresh)]
        for block_id in fresh:
            self._references[block_id] = 1
            self._forget(block_id)
        return [*cached, *fresh]

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each block. The last blocks of a sequence are taken again before its first ones."""
        self.num_references -= len(block_ids)
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} is not held"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def replace(self, block_ids: Sequence[int]) -> list[int] | None:
        """Drops one reference of each block and holds as many free ones, which it returns. Returns None and changes
        nothing if too few would be free."""
        freed = sum(1 for block_id in block_ids if self._references[block_id] == 1)
        if len(self._free) + freed < len(block_ids):
            return None
        self.give_back(block_ids)
        return self.take((), len(block_ids))

    def register(
        self, block_id: int, key: BlockKey, *, root: bytes = b"", windowless: bool = False, reported: bool = True
    ) -> None:
        """Offers a held block to later sequences. The first block of a key stays, unless it lacks windows and the new
        one does not.

        Args:
            root: the parent of its sequence's first block, for `forget_roots`.
            windowless: layers with a sliding window lack the KV of some of the block's tokens.
            reported: whether followers see the block now; if not, `report` shows it.
        """
        assert self._references[block_id] > 0, f"block {block_id} is not held"
        if self._keys[block_id] is not None:
            return
        known = self._by_digest.get(key.digest)
        if known is not None:
            if windowless or known not in self._windowless:
                if reported:
                    self.report((known,))
                return
            self._forget(known)
        self._keys[block_id] = key
        self._roots[block_id] = root
        self._by_digest[key.digest] = block_id
        self._by_content[key.parent, key.tokens] = key
        if windowless:
            self._windowless.add(block_id)
        if not reported:
            self._unreported.add(block_id)
        elif self._changes is not None and not windowless:
            self._note(key.digest, key)

    def report(self, block_ids: Iterable[int]) -> None:
        """Shows these blocks to followers of the cache, if they serve every sequence."""
        for block_id in block_ids:
            if block_id not in self._unreported:
                continue
            self._unreported.remove(block_id)
            key = self._keys[block_id]
            if self._changes is not None and key is not None and block_id not in self._windowless:
                self._note(key.digest, key)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Removes these blocks from the prefix index."""
        for block_id in block_ids:
            self._forget(block_id)

    def forget_roots(self, roots: frozenset[bytes]) -> int:
        """Removes the blocks of all sequences with one of these roots from the prefix index. Returns their number."""
        found = [
            block_id for block_id, key in enumerate(self._keys) if key is not None and self._roots[block_id] in roots
        ]
        self.forget(found)
        return len(found)

    # ---- following the cache

    def cached_keys(self) -> list[BlockKey]:
        """The keys of all blocks that are cached now, in no order."""
        if hidden := self._windowless | self._unreported:
            return [key for block_id, key in enumerate(self._keys) if key is not None and block_id not in hidden]
        return [key for key in self._keys if key is not None]

    def cached_key(self, digest: bytes) -> BlockKey | None:
        """The key of that digest. Returns None if no block that serves every sequence has it."""
        block_id = self._by_digest.get(digest)
        return None if block_id is None or block_id in self._windowless else self._keys[block_id]

    def lacking(self, digests: Iterable[bytes]) -> list[bytes]:
        """The digests for which `cached_key` is None."""
        known, windowless = self._by_digest, self._windowless
        if not windowless:
            return [digest for digest in digests if digest not in known]
        return [digest for digest in digests if digest not in known or known[digest] in windowless]

    def cached_blocks(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of these keys. Empty: one of them is not cached, or does not serve every sequence."""
        found = [self._by_digest.get(key.digest) for key in keys if self.cached_key(key.digest) == key]
        return [] if len(found) < len(keys) else [block_id for block_id in found if block_id is not None]

    def not_shown(self, digests: Iterable[bytes]) -> list[bytes]:
        """The digests of blocks that followers do not know, and that its next changes will not tell them of."""
        known = self._by_digest
        if not self._windowless and not self._unreported:
            return [digest for digest in digests if digest not in known]
        hidden = self._windowless | self._unreported
        return [digest for digest in digests if digest not in known or known[digest] in hidden]

    def follow(self) -> None:
        """Collects changes from now on."""
        self._changes = {}

    def take_changes(self) -> CacheChanges | None:
        """The latest change of each digest since the last call. Returns None if the cache is not followed, or if there
        were too many changes to keep; then none are collected until `follow`."""
        changes = self._changes
        if changes:
            self._changes = {}
        return changes

    def outside(self, digests: Iterable[bytes]) -> list[bytes]:  # noqa: ARG002
        return []

    def only_below(self, outside: Iterable[bytes]) -> list[bytes]:  # noqa: ARG002
        return []

    # ----

    def _note(self, digest: bytes, key: BlockKey | None) -> None:
        assert self._changes is not None
        self._changes[digest] = key
        if len(self._changes) > self.num_blocks // 2 + _CHANGES_MIN:  # then reading all keys costs less
            self._changes = None

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._by_digest[key.digest]
            del self._by_content[key.parent, key.tokens]
            self._keys[block_id] = None
            if self._changes is not None:
                self._note(key.digest, None)
            self._windowless.discard(block_id)
            self._unreported.discard(block_id)
