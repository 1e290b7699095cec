"""Shows the progress of a command: a bar for the current run on a terminal, a line for each run elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from baton.core.log_lines import escaped
from baton.load.runner import OnProgress
from baton.load.worker import WorkerProgress as Counts


class LoadProgress:
    """A display on stderr, within its `with` block."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[running]} running, {task.fields[failed]} failed"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._console.print(f"baton: {escaped(line)}", markup=False, soft_wrap=True)

    def run(self, title: str, total: int) -> OnProgress:
        """Starts the bar of the next run, in place of the last one's."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        if not self._console.is_terminal:
            self.say(f"{title}: {total} requests")
        task = self._task = self._progress.add_task(title, total=total, running=0, failed=0)

        def show(counts: Counts) -> None:
            self._progress.update(
                task, completed=counts.ended, running=counts.sent - counts.ended, failed=counts.failed
            )

        return show
