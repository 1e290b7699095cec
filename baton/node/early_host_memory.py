"""Page-locks one rank's host memory for KV while the model loads: it takes seconds, and stops launches."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from baton.settings.node_config import NodeSettings
from kvtransfer.movers.host_pages import HostPages

_log = logging.getLogger(__name__)


def _lock(num_bytes: int, device: torch.device) -> HostPages:
    with torch.cuda.device(device):
        return HostPages(num_bytes, pinned=True)


class EarlyHostMemory:
    """Host memory that a thread page-locks from now on. A CPU needs no page-locking, so there is none for it.

    Args:
        device: of the rank, which gets access to the memory, such as cuda:0.
        lock: makes and locks so many bytes for a device.

    Attributes:
        pages: the memory, after `wait`; None: there is none.
    """

    def __init__(
        self,
        settings: NodeSettings,
        device: str,
        *,
        lock: Callable[[int, torch.device], HostPages] = _lock,
    ) -> None:
        self.pages: HostPages | None = None
        self._lock = lock
        self._locked: Future[tuple[HostPages, float]] | None = None
        self._gib = settings.host_cache_gib
        target = torch.device(device)
        if target.type == "cuda" and settings.host_cache_bytes:
            thread = ThreadPoolExecutor(1, "host-memory")
            self._locked = thread.submit(self._run, settings.host_cache_bytes, target)
            thread.shutdown(wait=False)

    def wait(self, *, log: bool = True) -> None:
        """Waits until the memory is locked.

        Raises:
            ConfigError: this machine cannot give so much.
        """
        if self._locked is None:
            return
        began_s = time.monotonic()
        self.pages, took_s = self._locked.result()
        if log:
            _log.info(
                "each rank keeps KV in %.3g GiB of host memory, page-locked in %.1f s; the start waited %.1f s for it",
                self._gib,
                took_s,
                time.monotonic() - began_s,
            )

    def _run(self, num_bytes: int, device: torch.device) -> tuple[HostPages, float]:
        """The memory, and the seconds that it took."""
        began_s = time.monotonic()
        return self._lock(num_bytes, device), time.monotonic() - began_s
