"""The reason why a node's process cannot continue: its last log line and its exit code."""

import logging
import traceback
from dataclasses import dataclass, replace

from baton.core.errors import ConfigError
from baton.core.supervisor import Supervisor
from baton.engine.device.out_of_memory import describe_out_of_memory
from baton.settings.reader import write_error

log = logging.getLogger("baton")


@dataclass(frozen=True)
class Fault:
    """The reason why a process ends. Ranks send their faults to rank 0, which logs them.

    Attributes:
        reason: one line; empty if nothing needs to be logged.
        exit_code: 2 if a setting cannot work, 1 for another fault, 0 for none.
        lines: the traceback of an unexpected error.
        setting: the error of a setting.
        place: where the fault happened, such as a rank and its process; empty for this process.
    """

    reason: str
    exit_code: int = 1
    lines: str = ""
    setting: ConfigError | None = None
    place: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        if isinstance(error, ConfigError):
            return cls(str(error), 2, setting=error)
        if isinstance(error, SystemExit):
            return cls("", error.code if isinstance(error.code, int) else 0)
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", 0)
        if (line := describe_out_of_memory(error)) is not None:
            return cls(line)
        name = f"{type(error).__name__}: {error}".partition("\n")[0]
        return cls(name, lines="".join(traceback.format_exception(error)))

    def within(self, place: str) -> "Fault":
        """The same fault with its place, for other processes."""
        return replace(self, place=f"{place}: {self.place}" if self.place else place)

    @property
    def line(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason

    def log(self, program: str, supervisor: Supervisor | None = None) -> None:
        """Logs the fault as the last line of this process. A supervisor, if there is one, shows a wrong setting."""
        if self.setting is not None:
            write_error(f"{program}: {self.place}" if self.place else program, self.setting, supervisor)
        elif self.reason:
            log.log(logging.ERROR if self.exit_code else logging.INFO, "%s", self.line, extra={"lines": self.lines})
