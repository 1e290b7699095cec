"""Shows the progress of a starting cluster: one row per process on a terminal, plain lines elsewhere."""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from baton.cli.cluster_log import ClusterLog
from baton.cli.processes import Process, Running, module_of
from baton.core.log_lines import escaped
from baton.settings.environment import child_environment


class ClusterProgress:
    """Shows the stage of each process. Inside the context, other lines appear above the rows.

    Args:
        console: where to print; default: stderr, or stdout with `log`, whose reader is a person.
        log: chooses which log lines of processes are shown, and how; None: every line as it is. With it, lines of
            `note` are left out.
    """

    def __init__(self, console: Console | None = None, *, log: ClusterLog | None = None) -> None:
        self._console = console or Console(stderr=log is None, highlight=False)
        self._log = log
        self._since: dict[str, float] = {}  # when each process began its stage
        self._stages: dict[str, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the rows. Lines may still be printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        self._print(f"baton: {escaped(line)}")

    def note(self, line: str) -> None:
        """Prints a line about a usual step of the start."""
        if self._log is None:
            self.say(line)

    def update(self, processes: Sequence[Process]) -> None:
        """Shows what the processes last reported."""
        for process in processes:
            if self._stages.get(process.name) == process.stage:
                continue
            self._stages[process.name] = process.stage
            self._since[process.name] = time.monotonic()
            # `wait_ready` prints a line for a ready process, and starting is too short to be worth one.
            if self._live is None and not process.ready and not process.stage.startswith("starting"):
                self.say(f"{process.name}: {process.stage}")
        if self._live is not None:
            self._live.update(self._table(processes))

    def launch(self, program: str, arguments: Sequence[str]) -> Running:
        """Starts a program in its own session, so that Ctrl-C reaches only this process, which drains the others.

        On a terminal, or with a log, the program's lines go through this display; elsewhere they go straight to stderr.
        """
        piped = self._console.is_terminal or self._log is not None
        popen = subprocess.Popen(
            [sys.executable, "-m", module_of(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else sys.stderr,
            stderr=subprocess.STDOUT if piped else None,
            env=child_environment(OMP_NUM_THREADS="1"),  # several processes share few cores
            start_new_session=True,
        )
        if popen.stdout is not None:
            threading.Thread(target=self._forward, args=(popen.stdout,), name=f"lines-{popen.pid}", daemon=True).start()
        return popen

    def _forward(self, lines: IO[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if self._log is None:
                self._print(text)
            elif shown := self._log.shown(text):
                self._print(shown)

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _table(self, processes: Sequence[Process]) -> Table:
        table = Table.grid(padding=(0, 2))
        for process in processes:
            bar: ProgressBar | str = ""
            measure = ""
            if process.total:
                bar = ProgressBar(total=process.total, completed=process.done, width=16)
                measure = f"{process.done / (1 << 30):.1f}/{process.total / (1 << 30):.1f} GiB"
            elapsed = "" if process.ready else f"{time.monotonic() - self._since[process.name]:.0f} s"
            style = "green" if process.ready else None
            table.add_row(process.name, Text(process.stage, style=style or ""), bar, measure, elapsed)
        return table
