"""Shows the progress of a long load: reports to `baton up`, else a bar on a terminal, or log lines."""

import logging
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from baton.core.supervisor import Supervisor

log = logging.getLogger(__name__)

# Shorter loads are not worth a line.
_SILENT_S = 1.0
_LOADING = "loading weights"


class LoadingProgress:
    """A context manager; within it, one thread calls it with the bytes done so far and the total.

    The bar is visible only between the first call and completion, because it would share its line with log output.

    Args:
        loaded: name of the thing being loaded, such as "weights".
        console: shows the bar if it is a terminal; None: stderr.
        clock: monotonic seconds.
    """

    def __init__(
        self, loaded: str = "weights", *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loaded = loaded
        self._clock = clock
        self._since = clock()
        self._shown_tenths = 0
        console = console or Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, get_time=clock) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(loaded, total=None)

    def __enter__(self) -> "LoadingProgress":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)
            if done_bytes >= total_bytes:
                self._bar.stop()
            return
        elapsed_s = self._clock() - self._since
        tenths = 10 * done_bytes // max(1, total_bytes)
        if tenths > self._shown_tenths and elapsed_s > _SILENT_S:
            self._shown_tenths = tenths
            rate = done_bytes / elapsed_s / 1e9
            log.info("%s: %d of %d MiB, %.2f GB/s", self._loaded, done_bytes >> 20, total_bytes >> 20, rate)


class ReportedProgress:
    """Reports each percent of a load to the supervisor, which shows all processes together.

    Args:
        shown: also shows the progress here; None if the supervisor does.
    """

    def __init__(self, supervisor: Supervisor, shown: LoadingProgress | None = None) -> None:
        self._supervisor = supervisor
        self._shown = shown
        self._percent = -1

    def __enter__(self) -> "ReportedProgress":
        self._supervisor.report(_LOADING)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.__exit__(error_type, error, traceback)

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._shown is not None:
            self._shown(done_bytes, total_bytes)
        percent = 100 * done_bytes // max(1, total_bytes)
        if percent == self._percent:
            return
        self._percent = percent
        if done_bytes < total_bytes:
            self._supervisor.report(_LOADING, done=done_bytes, total=total_bytes)
        else:
            # After a load come profiles and, on a GPU, kernels that compile during the profiles.
            self._supervisor.report("compiling")
