"""Memory of the host for KV outside of the cache. A GPU's copy engine needs it page-locked, a CPU does not."""

import ctypes
import logging
import mmap
import threading
from typing import Protocol

import torch

from baton.core.errors import ConfigError

# So many units are page-locked before a `HostPages` is made; the others meanwhile it is used.
FIRST_UNITS = 16
# Bytes that are page-locked in one call, because calls of other threads to the GPU's driver may wait for it.
_SLAB_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python has no name for it

_log = logging.getLogger(__name__)


class PageLocks(Protocol):
    """Locks pages for a GPU. Any thread may use it, one at a time."""

    def lock(self, address: int, num_bytes: int) -> str:
        """Returns why the pages cannot be locked, or "" once they are."""
        ...

    def unlock(self, address: int) -> None:
        """Unlocks what one call of `lock` has locked from this address on."""
        ...


class CudaPageLocks:
    """Page-locking for the GPU that is current when this is made."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._runtime = torch.cuda.cudart()
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def lock(self, address: int, num_bytes: int) -> str:
        # Most of the time goes into making the pages. Made here, they do not keep other threads from the driver. An
        # older kernel refuses, and then the driver makes them.
        self._madvise(address, num_bytes, _MADV_POPULATE_WRITE)
        with torch.cuda.device(self._device):
            status = int(self._runtime.cudaHostRegister(address, num_bytes, 0))
        return "" if status == 0 else f"it was not page-locked (CUDA's status {status})"

    def unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._runtime.cudaHostUnregister(address)


class HostPages:
    """Zeroed pages. Without page-locking each exists from the first write to it on, so unused ones cost nothing.

    Page-locking takes seconds for many GiB. So only the first pages are locked at once, and a thread locks the others.

    Args:
        unit_bytes: size of what is stored here, a multiple of the page size: no unit is in two slabs, which a GPU would
            refuse to copy. By default there is one unit.
        locks: locks the pages; None: they need not be locked.

    Attributes:
        tensor: all of it, uint8, from the start of a page. Use no more than the first `usable_bytes`.

    Raises:
        ConfigError: the machine cannot give that much, or cannot lock the first pages.
    """

    def __init__(self, num_bytes: int, *, unit_bytes: int | None = None, locks: PageLocks | None = None) -> None:
        try:
            # Not through torch, whose allocator rounds page-locked memory up to a power of two.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise _too_much(num_bytes, error) from None
        pages.madvise(mmap.MADV_DONTFORK)  # forked helpers of this process have no use for it
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)
        self.usable_bytes = num_bytes
        self._num_bytes = num_bytes
        self._locks = locks
        self._slabs: list[int] = []  # addresses
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if locks is not None:
            pages.madvise(mmap.MADV_HUGEPAGE)  # page-locking costs time per page
            self._lock_pages(locks, unit_bytes or num_bytes)

    def close(self) -> None:
        """Ends page-locking. The pages go when nothing refers to the tensor or a part of it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        while self._slabs and self._locks is not None:
            self._locks.unlock(self._slabs.pop())

    def _lock_pages(self, locks: PageLocks, unit_bytes: int) -> None:
        slab_bytes = max(1, _SLAB_BYTES // unit_bytes) * unit_bytes
        self.usable_bytes = 0
        if reason := self._lock_slab(locks, max(slab_bytes, FIRST_UNITS * unit_bytes)):
            raise _too_much(self._num_bytes, reason)
        if self.usable_bytes < self._num_bytes:
            self._thread = threading.Thread(
                target=self._lock_others, args=(locks, slab_bytes), name="page-locks", daemon=True
            )
            self._thread.start()

    def _lock_others(self, locks: PageLocks, slab_bytes: int) -> None:
        while self.usable_bytes < self._num_bytes and not self._closing.is_set():
            if reason := self._lock_slab(locks, slab_bytes):
                _log.warning(
                    "the host cache has %d of %d MiB: %s; choose a smaller host cache",
                    self.usable_bytes >> 20,
                    self._num_bytes >> 20,
                    reason,
                )
                return

    def _lock_slab(self, locks: PageLocks, num_bytes: int) -> str:
        """Locks the next pages. Returns why it cannot, or ""."""
        address, num_bytes = (
            self.tensor.data_ptr() + self.usable_bytes,
            min(num_bytes, self._num_bytes - self.usable_bytes),
        )
        reason = locks.lock(address, num_bytes)
        if not reason:
            self._slabs.append(address)
            self.usable_bytes += num_bytes
        return reason


def _too_much(num_bytes: int, reason: object) -> ConfigError:
    return ConfigError(
        f"this machine cannot give {num_bytes} bytes of memory to the host cache: {reason}",
        field="host_cache_bytes",
        value=num_bytes,
        cure="choose a smaller host cache",
    )
