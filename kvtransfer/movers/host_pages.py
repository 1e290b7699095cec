"""Memory of the host for KV outside of the cache. A GPU's copy engine needs it page-locked, a CPU does not."""

import mmap
from concurrent.futures import ThreadPoolExecutor

import torch

from baton.core.errors import ConfigError

# Pages are made by so many threads, because making them takes most of the time of page-locking.
_THREADS = 8
_PAGE_BYTES = mmap.PAGESIZE


class HostPages:
    """Zeroed pages. Without page-locking each exists from the first write to it on, so unused ones cost nothing.

    Args:
        pinned: page-locked for the thread's current GPU, which takes seconds for many GiB.

    Attributes:
        tensor: all of it, uint8, from the start of a page.

    Raises:
        ConfigError: the machine cannot give that much.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        try:
            # Not through torch, whose allocator rounds page-locked memory up to a power of two.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise _too_much(num_bytes, error) from None
        pages.madvise(mmap.MADV_DONTFORK)  # forked helpers of this process have no use for it
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)
        self._device: int | None = None
        if pinned:
            self._pin(pages, num_bytes)

    def close(self) -> None:
        """Ends page-locking. The pages go when nothing refers to the tensor or a part of it."""
        if self._device is not None:
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._device = None

    def _pin(self, pages: mmap.mmap, num_bytes: int) -> None:
        pages.madvise(mmap.MADV_HUGEPAGE)  # page-locking costs time per page
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(_touch, self.tensor[::_PAGE_BYTES].chunk(_THREADS)))
        status = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if status != 0:
            raise _too_much(num_bytes, f"it was not page-locked (CUDA's status {status})")
        self._device = torch.cuda.current_device()


def _touch(first_bytes: torch.Tensor) -> None:
    """Makes pages, given their first bytes. Torch lets other threads run meanwhile."""
    first_bytes.zero_()


def _too_much(num_bytes: int, reason: object) -> ConfigError:
    return ConfigError(
        f"this machine cannot give {num_bytes} bytes of memory to the host cache: {reason}",
        field="host_cache_gib",
        value=round(num_bytes / (1 << 30), 6),
        cure="choose a smaller --host-cache-gib",
    )
