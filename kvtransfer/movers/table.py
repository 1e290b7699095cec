"""Chooses the mover for a cache."""

from collections.abc import Callable

from baton.kvcache.cache import PagedKVCache
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.mover import Mover


def open_mover(cache: PagedKVCache, between: Callable[[], object]) -> Mover:
    """The mover for the cache's device. On a GPU it compiles kernels, which takes seconds the first time."""
    if not cache.storage.is_cuda:
        return CpuMover(cache, between)
    # NOTE: imported here because only nodes with a GPU need it.
    from kvtransfer.movers.cuda import CudaMover

    return CudaMover(cache)
