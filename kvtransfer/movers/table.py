"""Which mover serves a cache."""

from collections.abc import Callable

from kvcache.cache import PagedKVCache
from kvtransfer.movers.cpu import CpuMover
from kvtransfer.movers.mover import Mover


def open_mover(cache: PagedKVCache, between: Callable[[], object]) -> Mover:
    """The mover for where the cache is; on a GPU compiles the kernels, which takes seconds the first time."""
    if not cache.storage.is_cuda:
        return CpuMover(cache, between)
    # NOTE: imported here because it is needed only where there is a GPU.
    from kvtransfer.movers.cuda import CudaMover

    return CudaMover(cache)
