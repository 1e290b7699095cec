"""Plain reads of files, and which share of files the page cache holds."""

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class Plain:
    """A way to read: pieces in the order of the files, each thread into its own buffer.

    Attributes:
        direct: bypasses the page cache.
    """

    threads: int
    direct: bool = False
    piece_bytes: int = 16 << 20

    def __str__(self) -> str:
        return f"{self.threads} thread(s){', O_DIRECT' if self.direct else ''}"

    def seconds(self, files: Sequence[Path]) -> float:
        """How long it takes to read these files.

        Raises:
            OSError: a file cannot be read, or not in this way.
        """
        pieces = deque((file, start) for file in files for start in range(0, file.stat().st_size, self.piece_bytes))
        failures: list[OSError] = []
        threads = [threading.Thread(target=self._work, args=(pieces, failures)) for _ in range(self.threads)]
        since = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.perf_counter() - since
        if failures:
            raise failures[0]
        return took_s

    def _work(self, pieces: deque[tuple[Path, int]], failures: list[OSError]) -> None:
        # O_DIRECT needs page-aligned memory, which a mapping is.
        with mmap.mmap(-1, self.piece_bytes) as buffer, memoryview(buffer) as memory:
            try:
                while True:
                    file, start = pieces.popleft()
                    _read(file, start, memory, direct=self.direct)
            except IndexError:
                return  # no piece is left
            except OSError as error:
                failures.append(error)


def _read(file: Path, start: int, memory: memoryview, *, direct: bool) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        done = 0
        while done < len(memory):
            with memory[done:] as rest:
                count = os.preadv(descriptor, [rest], start + done)
            done += count
            if count == 0 or done % _PAGE_BYTES:
                return  # the end of the file
    finally:
        os.close(descriptor)


def drop(files: Sequence[Path]) -> float:
    """Evicts files from the page cache, which needs only the right to read them. Returns the share of their pages that
    stays in the cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # dirty pages would stay in the cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return cached_share(files)


def cached_share(files: Sequence[Path]) -> float:
    """The share of these files' pages that the page cache holds."""
    pages = [_cached_pages(file) for file in files]
    return sum(cached for cached, _ in pages) / max(1, sum(count for _, count in pages))


def _cached_pages(file: Path) -> tuple[int, int]:
    """The file's pages in the cache, and all its pages."""
    size_bytes = file.stat().st_size
    if not size_bytes:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    count = -(-size_bytes // _PAGE_BYTES)
    states = (ctypes.c_ubyte * count)()
    # NOTE: ctypes takes the address of writable memory only. A private mapping is writable, and its untouched pages are
    # those of the file.
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_ubyte.from_buffer(mapping)
        try:
            failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(size_bytes), states)
        finally:
            del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(file))
    return sum(state & 1 for state in states), count
