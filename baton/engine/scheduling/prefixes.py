"""Presents several prefix caches as one, to followers of a node's cache. Pure."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.core.block_keys import BlockKey
from baton.engine.scheduling.block_manager import CacheChanges


class PrefixCache(Protocol):
    """The methods that followers of a prefix cache call; see `BlockManager`."""

    def cached_keys(self) -> list[BlockKey]: ...

    def follow(self) -> None: ...

    def take_changes(self) -> CacheChanges | None: ...

    def outside(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of the cached blocks that only the stores outside of the cache have, so that they must be loaded
        first."""
        ...

    def only_below(self, outside: Iterable[bytes]) -> list[bytes]:
        """Those of the blocks outside that only stores below host memory have, which are slower to load."""
        ...


class KeyedCache(PrefixCache, Protocol):
    """One of several prefix caches."""

    def cached_key(self, digest: bytes) -> BlockKey | None: ...

    def lacking(self, digests: Iterable[bytes]) -> list[bytes]:
        """The digests for which `cached_key` is None."""
        ...

    def not_shown(self, digests: Iterable[bytes]) -> list[bytes]:
        """The digests of blocks that followers do not know, and that its next changes will not tell them of."""
        ...


class PooledPrefixes:
    """The union of several prefix caches, such as those of pools: a block is cached while any of them has it.

    Args:
        outside: what the stores outside of the cache have; None: there are none.
    """

    def __init__(self, pools: Sequence[KeyedCache], outside: KeyedCache | None = None) -> None:
        self._inside, self._outside = pools, outside
        self._pools = pools if outside is None else (*pools, outside)

    def cached_keys(self) -> list[BlockKey]:
        return list({key.digest: key for pool in self._pools for key in pool.cached_keys()}.values())

    def follow(self) -> None:
        for pool in self._pools:
            pool.follow()

    def take_changes(self) -> CacheChanges | None:
        changes: CacheChanges = {}
        for pool in self._pools:
            if (of_pool := pool.take_changes()) is None:
                return None
            # Nearly every block that is saved is in the cache still, and followers know that.
            changes.update(of_pool if pool is not self._outside else self._seen(of_pool))
        # A key is the latest change of its cache, which has that block then.
        return {digest: self._cached(digest) if key is None else key for digest, key in changes.items()}

    def outside(self, digests: Iterable[bytes]) -> list[bytes]:
        left = list(digests)
        for pool in self._inside:
            left = pool.lacking(left)
        return left

    def only_below(self, outside: Iterable[bytes]) -> list[bytes]:
        return [] if self._outside is None else self._outside.only_below(outside)

    def _seen(self, outside: CacheChanges) -> CacheChanges:
        """Those of the changes outside of the caches that make a difference to followers."""
        left: Iterable[bytes] = outside
        for pool in self._inside:
            left = pool.not_shown(left)
        return {digest: outside[digest] for digest in left}

    def _cached(self, digest: bytes) -> BlockKey | None:
        """The key of that digest as long as any pool has it."""
        return next((key for pool in self._pools if (key := pool.cached_key(digest)) is not None), None)
